// log(1 + x) that compilers vectorize inside the engines' loops on the CPU.
//
// log(1 + x) = 2 atanh(s) with s = x / (2 + x), by its power series: s is at most 1/3, and what is
// left out behind the eighth term is below 1.5e-9 of the result.
#pragma once

#include <cmath>

#include "apex/core/types.h"
#include "apex/math/quotient.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_CPU)

// For x in [0, 1]; within 2 ulp. NaN stays. Neither a branch nor a call.
APEX_HD float log1p_of_unit(float x) {
  const float s = quotient(x, 2.0f + x), t = s * s;
  float p = 2.0f / 15;
  p = p * t + 2.0f / 13;
  p = p * t + 2.0f / 11;
  p = p * t + 2.0f / 9;
  p = p * t + 2.0f / 7;
  p = p * t + 2.0f / 5;
  p = p * t + 2.0f / 3;
  return 2.0f * s + s * (t * p);
}

#else

APEX_HD float log1p_of_unit(float x) { return std::log1p(x); }

#endif

APEX_HD double log1p_of_unit(double x) { return std::log1p(x); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex
