// Euclidean norm over lists of tensors: the root of a sum of squares.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// For foreach_reduce. *flag becomes 1 where an element is not finite; squares that leave the range
// of T do not count, because such chunks are summed again in double.
template <class T>
struct L2Norm {
  using value_type = T;

  int* flag;  // may be null

  APEX_HD T operator()(T x) const { return x * x; }

  template <class U>
  APEX_HD static U combine(U a, U b) {
    return a + b;
  }
  APEX_HD static double finish(double sum) { return std::sqrt(sum); }

  // Whether rounding is all that a partial sum can suffer from. Below the bound squares may have
  // been rounded to subnormal numbers or to zero.
  APEX_HD static bool is_reliable(double sum) { return sum > 1e-30 && is_finite(sum); }
  APEX_HD L2Norm<double> wide() const { return {flag}; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
