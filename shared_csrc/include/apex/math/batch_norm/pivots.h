// Moments of columns around pivots, see apex/math/pivot.h.
#pragma once

#include "apex/math/batch_norm/statistics.h"
#include "apex/math/pivot.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class X>
struct PivotMoments {
  using matrix_type = X;
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2, kRowsAtOnce = 4, kVectors = 1, kBefore = 1;

  const X* x;  // [rows, columns]
  int64_t rows, columns;
  Statistics<T> results;  // of a part: mean - pivot, as the mean itself would lose digits
  bool is_part = false;
  ColumnVectors<T> vectors{};  // pivots: set by a GPU's engine, by the caller for a CPU

  APEX_HD Array<T, 1> before(int64_t column) const {
    return {rows == 0 ? T(0) : column_pivot<T>(x, rows, columns, column)};
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(AddAround{}, row.in(x), row.shared(vectors[0]));
  }
  template <class U>  // T, or double
  APEX_HD void finish(int64_t column, const Array<U, 2>& sums) const {
    const double n = static_cast<double>(rows), share = n > 0 ? 1 / n : 0, shift = sums[0] * share;
    const double var = sums[1] * share - shift * shift;
    const double m2 = var < 0 ? 0 : var * n;  // NaN stays
    const double pivot = is_part || rows == 0 ? 0 : pivot_of(column);
    results.store(column, Moments<double>{{n, pivot + shift, m2}});
  }

 private:
  APEX_HD T pivot_of(int64_t column) const {
#if defined(APEX_GPU)
    return before(column)[0];
#else
    return vectors[0][column];
#endif
  }
};

// The moments of the columns of a matrix that is one part: Welford's on a CPU.
template <class X, class T>
auto moments_of_matrix(const X* x, [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t columns,
                       const Statistics<T>& results) {
#if defined(APEX_GPU)
  return PivotMoments<X>{x, rows, columns, results};
#else
  return ColumnMoments<X>{x, results};
#endif
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
