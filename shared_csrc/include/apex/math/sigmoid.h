// The logistic function, and SiLU, x * sigmoid(x).
#pragma once

#include "apex/math/exp.h"
#include "apex/math/quotient.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
APEX_HD T sigmoid(T x) {
  return quotient(T(1), T(1) + exponential(-x));
}

template <class T>
APEX_HD T silu(T x) {
  return x * sigmoid(x);
}

// The derivative of SiLU at x, where s is sigmoid(x).
template <class T>
APEX_HD T silu_slope(T x, T s) {
  return s * (T(1) + x * (T(1) - s));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
