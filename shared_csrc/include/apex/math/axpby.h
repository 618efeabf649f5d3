// Weighted sum with a check for inf and NaN: out = a * x + b * y.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Columns: x, y (read), out (written). `check` selects the operand whose values are tested: 0 for
// x, 1 for y, -1 for both. Returns 1 where a tested value is not finite.
template <class T>
struct Axpby {
  using value_type = T;

  T a, b;
  int check;
  int* flag;

  APEX_HD int operator()(T& x, T& y, T& out) const {
    out = a * x + b * y;
    T tested_x = check != 1 ? x : T(0);
    T tested_y = check != 0 ? y : T(0);
    return !(static_cast<int>(is_finite(tested_x)) & static_cast<int>(is_finite(tested_y)));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
