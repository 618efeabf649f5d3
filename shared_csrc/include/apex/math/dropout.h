// Dropout whose random numbers depend on a seed and on an element's index alone.
//
// Srivastava et al. 2014 (https://jmlr.org/papers/v15/srivastava14a.html); philox.h has the
// numbers.
#pragma once

#include "apex/core/divide.h"
#include "apex/math/philox.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Which random numbers elements [matrices, own_rows, own columns] get: those of the upper left
// corners of matrices [rows, columns], which are larger, and of which `first` come before. Without
// rows, elements are numbered by themselves.
struct Corner {
  int64_t own_rows = 0, first = 0, rows = 0, columns = 0;

  // How far behind its index among the elements a row's first number lies, modulo 2^64.
  APEX_HD uint64_t offset(int64_t row, int64_t own_columns) const {
    if (rows == 0) return 0;
    int64_t rest;
    const uint64_t matrix = static_cast<uint64_t>(first) + divide(row, own_rows, rest);
    const uint64_t of_corner = matrix * static_cast<uint64_t>(rows) + rest;
    return first_number(of_corner, columns) - first_number(row, own_columns);
  }
};

// What is kept of a number, and what else it is multiplied with.
struct Dropout {
  const int64_t* seed;  // one number; null: nothing is dropped
  float p;              // a float for every dtype, so that all keep the same
  double scale;         // 1 / (1 - p)
  Corner corner = {};

  template <class R>
  APEX_HD UniformNumbers numbers_of(const R& row) const {
    return {static_cast<uint64_t>(*seed), corner.offset(row.index(), row.columns())};
  }

  template <class T>
  APEX_HD T operator()(T x, T uniform) const {
    return uniform >= T(p) ? x * T(scale) : T(0);
  }
};

template <class S>
struct DropoutOfRows {
  using value_type = compute_t<S>;

  const S* x;  // [rows, columns]
  S* y;
  Dropout dropout;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    const Dropout drop = dropout;
    row.each([drop](T& y, T x, T uniform) { y = drop(x, uniform); }, row.out(y), row.in(x),
             row.generated(dropout.numbers_of(row)));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
