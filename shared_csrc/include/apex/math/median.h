// The middle one of three numbers.
#pragma once

#include "apex/core/config.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
APEX_HD T median(T a, T b, T c) {
  T low = a < b ? a : b, high = a < b ? b : a;
  T upper = high < c ? high : c;
  return low > upper ? low : upper;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
