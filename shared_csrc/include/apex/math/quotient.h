// A quotient without a branch.
#pragma once

#include <type_traits>

#include "apex/core/config.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// a / b. GPUs give float within two units in the last place, and 0 for divisors above 2^126: the
// rounding of a division has a slow path, whose call costs each loop around it a dozen registers.
template <class T>
APEX_HD T quotient(T a, T b) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  if constexpr (std::is_same_v<T, float>) return __fdividef(a, b);
#endif
  return a / b;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
