// Norm of order 1 over lists of tensors: the sum of absolute values.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// For foreach_reduce. A chunk whose sum leaves the range of T is summed again in double.
template <class T>
struct L1Norm {
  using value_type = T;

  APEX_HD T operator()(T x) const { return std::abs(x); }

  template <class U>
  APEX_HD static U combine(U a, U b) {
    return a + b;
  }
  APEX_HD static double finish(double sum) { return sum; }

  APEX_HD static bool is_reliable(double sum) { return is_finite(sum); }
  APEX_HD L1Norm<double> wide() const { return {}; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
