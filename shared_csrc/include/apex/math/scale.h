// Scaled copy with a check for inf and NaN: y = x * scale.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Columns: x (read), y (written). Returns 1 where x is not finite.
template <class T>
struct Scale {
  using value_type = T;

  T scale;
  int* flag;

  APEX_HD int operator()(T& x, T& y) const {
    y = x * scale;
    return !is_finite(x);
  }
};

// The same within one list: x = x * scale.
template <class T>
struct ScaleInPlace {
  using value_type = T;

  T scale;
  int* flag;

  APEX_HD int operator()(T& x) const {
    int found = !is_finite(x);
    x = x * scale;
    return found;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
