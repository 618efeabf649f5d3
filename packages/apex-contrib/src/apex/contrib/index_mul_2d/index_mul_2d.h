// Rows picked by an index and multiplied with other rows, and the gradients of both:
//
//   y[r] = in1[idx1[r]] * in2[r]
//   din1[m] = sum of dy[r] * in2[r] over all r with idx1[r] = m     din2[r] = dy[r] * in1[idx1[r]]
#pragma once

#include <limits>

#include "apex/core/types.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// idx1: row r of the result is made of row picks(r) of in1; negative numbers count from its end.
struct Picks {
  const int64_t* idx1;  // [rows]
  int64_t rows, in1_rows;
  int64_t ahead;  // how many rows later a row is read that a CPU asks for now

  // In [0, in1_rows), or -1: a GPU cannot raise an error for what is no row of in1.
  APEX_HD int64_t operator()(int64_t row) const {
    int64_t picked = idx1[row];
    picked += picked < 0 ? in1_rows : 0;
    return picked >= 0 && picked < in1_rows ? picked : -1;
  }

  // The row of in1 for this row, and for one that is read later.
  template <class R>
  APEX_HD Array<int64_t, 2> of(const R& row) const {
    if constexpr (requires { row.segment(); }) {
      return {{row.segment(), row.later_segment()}};
    } else {
      int64_t later = row.index() + ahead;
      return {{(*this)(row.index()), (*this)(later < rows ? later : rows - 1)}};
    }
  }
};

// result := in1[picked] * other of one row; NaN where idx1 is out of range.
template <class T, class S, class R>
APEX_HD void multiply_picked(R& row, const Picks& picks, const S* in1, const S* other, S* result) {
  const Array<int64_t, 2> rows = picks.of(row);
  const int64_t picked = rows[0] < 0 ? 0 : rows[0];
  const int64_t n = row.columns();
  const T one = rows[0] < 0 ? std::numeric_limits<T>::quiet_NaN() : T(1);
  row.each([=](T& y, T a, T b) { y = a * b * one; }, row.out(result),
           row.from(in1 + picked * n, (rows[1] - picked) * n), row.in(other));
}

// S is the storage type of all tensors.
template <class S>
struct IndexMulForward {
  using value_type = compute_t<S>;

  Picks picks;
  const S* in1;  // [in1_rows, columns]
  const S* in2;  // [rows, columns]
  S* y;          // as in2

  template <class R>
  APEX_HD void row(R& row) const {
    multiply_picked<value_type>(row, picks, in1, in2, y);
  }
};

template <class S>
struct IndexMulBackward {
  using value_type = compute_t<S>;
  using storage_type = S;
  using T = value_type;
  static constexpr int kSums = 1;  // din1

  Picks picks;
  const S* dy;   // as in2
  const S* in1;  // as of the forward
  const S* in2;
  S* din1;  // as in1
  S* din2;  // as in2

  template <class R>
  APEX_HD void row(R& row) const {
    multiply_picked<T>(row, picks, in1, dy, din2);
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<1>([](Array<T, 1>& sums, T dy, T in2) { sums[0] += dy * in2; },
                               row.in(dy), row.in(in2));
  }

  template <class R, class Sums>
  APEX_HD void finish(R& row, const Sums& sums) const {
    row.each([](T& din1, T sum) { din1 = sum; }, row.out(din1), sums[0]);
  }

  T* sums_as_results() const
    requires std::is_same_v<S, T>
  {
    return din1;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
