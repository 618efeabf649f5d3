// The logistic function.
#pragma once

#include "apex/math/exp.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
APEX_HD T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
