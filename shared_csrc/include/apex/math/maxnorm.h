// Maximum norm over lists of tensors: the largest absolute value.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// For foreach_reduce. A NaN anywhere is the result.
template <class T>
struct MaxNorm {
  using value_type = T;

  APEX_HD T operator()(T x) const { return std::abs(x); }

  template <class U>
  APEX_HD static U combine(U a, U b) {
    return max_propagating_nan(a, b);
  }
  APEX_HD static double finish(double largest) { return largest; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
