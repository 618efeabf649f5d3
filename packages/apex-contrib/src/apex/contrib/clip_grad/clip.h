// Scales gradients down to a norm: x = x * min(1, max_norm / (norm + 1e-6)).
#pragma once

#include "apex/core/types.h"

namespace apex::clip_grad {
inline namespace APEX_BACKEND_NS {

// Column: x (read and written).
template <class T>
struct Clip {
  using value_type = T;

  T coefficient;

  APEX_HD void operator()(T& x) const { x = x * coefficient; }
};

// The norm is on the device, where each thread turns it into the coefficient once.
template <class T>
struct ClipByNorm {
  const double* norm;
  double max_norm;

  // A NaN is no reason to skip: it goes into all gradients, as in torch.
  APEX_HD bool skip() const { return max_norm / (*norm + 1e-6) >= 1; }
  APEX_HD Clip<T> prepare() const { return {static_cast<T>(max_norm / (*norm + 1e-6))}; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::clip_grad
