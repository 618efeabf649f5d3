// Gradients times a number on their device: x = x * factor, where that is not 1.
#pragma once

#include "apex/core/types.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// For foreach.
template <class T>
struct ScaleByNumber {
  using value_type = T;

  const T* factor;  // on the device: nobody waits for it

  struct Scaled {
    using value_type = T;
    T factor;
    APEX_HD void operator()(T& x) const { x = x * factor; }
  };

  APEX_HD Scaled prepare() const { return {*factor}; }
  APEX_HD bool skip() const { return *factor == T(1); }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
