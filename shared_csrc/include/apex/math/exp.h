// exp() that compilers vectorize inside the engines' loops on the CPU.
//
// x = n ln 2 + r with |r| <= ln(2) / 2 (Cody & Waite 1980, chapter 6), e^r by a polynomial that
// Remez' algorithm fitted to a relative error of 3.1e-9, and 2^n by adding n to the exponent's
// bits.
#pragma once

#include <cmath>
#include <limits>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_CPU)

// Smallest and largest x whose exp is a normal, finite float: ln(2^-126) and ln((2 - 2^-23) 2^127).
inline constexpr float kSmallestExponent = -87.3365402f;
inline constexpr float kLargestExponent = 88.7228317f;

// e^x = power * 2^n; n + 127, the exponent's bits of 2^n, stands in the lowest bits of `biased`.
struct ExpParts {
  float power;
  uint32_t biased;
};

APEX_HD ExpParts split_exponential(float x) {
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the lowest bits.
  constexpr float kRounder = 12582912.0f + 127.0f;
  float shifted = x * 1.44269504f + kRounder;
  float n = shifted - kRounder;
  // ln 2 in two parts: the first has 9 bits, so its product with n is exact with or without FMA.
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float q = 1.38146110e-3f;
  q = q * r + 8.36871090e-3f;
  q = q * r + 4.16683875e-2f;
  q = q * r + 1.66665207e-1f;
  q = q * r + 4.99999935e-1f;
  q = q * r + 1.0f;
  return {q * r + 1.0f, bit_cast<uint32_t>(shifted)};
}

// Within 1.2 ulp of the true value (0.91 with FMA). inf gives inf, -inf 0, NaN NaN; above
// kLargestExponent the result is inf, and below kSmallestExponent, where it would be subnormal, 0.
// Neither a branch nor a call: libm's expf() is a call for every element.
APEX_HD float exponential(float x) {
  ExpParts parts = split_exponential(x);
  // Not a product: at the upper end n is 128, and only power, then below 1, makes it a float.
  uint32_t bits = bit_cast<uint32_t>(parts.power) + ((parts.biased - 127u) << 23);
  float result = x < kSmallestExponent ? 0.0f : bit_cast<float>(bits);
  return x <= kLargestExponent ? result : x + std::numeric_limits<float>::infinity();
}

// The same, three operations in twenty cheaper, for x up to 88: a softmax's differences to the
// maximum never come near.
APEX_HD float exponential_no_overflow(float x) {
  ExpParts parts = split_exponential(x);
  float result = parts.power * bit_cast<float>(parts.biased << 23);
  return x < kSmallestExponent ? 0.0f : result;
}

APEX_HD double exponential(double x) { return std::exp(x); }
APEX_HD double exponential_no_overflow(double x) { return std::exp(x); }

#else

// The GPU's own exp is accurate and fast; float subnormals are kept.
template <class T>
APEX_HD T exponential(T x) {
  return std::exp(x);
}
template <class T>
APEX_HD T exponential_no_overflow(T x) {
  return std::exp(x);
}

#endif

}  // namespace APEX_BACKEND_NS
}  // namespace apex
