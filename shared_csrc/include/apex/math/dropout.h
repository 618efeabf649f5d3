// Dropout whose random numbers depend on a seed and on an element's index alone.
//
// Srivastava et al. 2014 (https://jmlr.org/papers/v15/srivastava14a.html); philox.h has the
// numbers.
#pragma once

#include "apex/math/philox.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What is kept of a number, and what else it is multiplied with.
struct Dropout {
  const int64_t* seed;  // one number; null: nothing is dropped
  float p;              // a float for every dtype, so that all keep the same
  double scale;         // 1 / (1 - p)

  APEX_HD UniformNumbers numbers(uint64_t begin = 0) const {
    return {static_cast<uint64_t>(*seed), begin};
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
             row.generated(dropout.numbers()));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
