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

// a / b of counts: b is from 1 to 2^64. GPUs give double within two units in the last place,
// without the slow path of its division, which costs kernels a third of their registers.
template <class T>
APEX_HD T quotient_of_counts(T a, T b) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  if constexpr (std::is_same_v<T, double>) {
    double inverse = __fdividef(1.0f, static_cast<float>(b));
    for (int step = 0; step < 2; ++step) inverse += inverse * (1.0 - b * inverse);  // Newton's
    return a * inverse;
  }
#endif
  return a / b;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
