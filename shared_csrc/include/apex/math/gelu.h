// GELU in its tanh form, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), and its
// derivative.
//
// 0.5 (1 + tanh u) is sigmoid(2u): one exp, and no digits are lost where x is negative.
//
// Hendrycks & Gimpel, "Gaussian error linear units", 2016 (https://arxiv.org/abs/1606.08415),
// section 2.
#pragma once

#include <cmath>

#include "apex/math/sigmoid.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

inline constexpr double kTwoRootTwoOverPi = 1.5957691216057307117597842397375;
inline constexpr double kGeluCubic = 0.044715;

// x cubed overflows for |x| above 7e12 in float; the result is still 0 or x.
template <class T>
APEX_HD T gelu_tanh(T x) {
  return x * sigmoid(T(kTwoRootTwoOverPi) * x * (T(1) + T(kGeluCubic) * x * x));
}

// s + x s (1 - s) (2u)' with s = sigmoid(2u). From t = exp(-|2u|), s (1 - s) is t / (1 + t)^2,
// which loses no digits where s is nearly 1, and is 0 where t is.
template <class T>
APEX_HD T gelu_tanh_slope(T x) {
  T square = T(kGeluCubic) * x * x;
  T t = exponential_no_overflow(-std::fabs(T(kTwoRootTwoOverPi) * x * (T(1) + square)));
  T r = quotient(T(1), T(1) + t);
  T s = x < T(0) ? t * r : r;
  return s + x * (t * r * r) * T(kTwoRootTwoOverPi) * (T(1) + T(3) * square);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
