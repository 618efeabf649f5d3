// Checks of the numbers of an optimizer's step, which otherwise divide by zero or give NaN.
//
// A learning rate may be negative: that is one way to ascend.
#pragma once

#include "apex/torch/check.h"

namespace apex {

inline void check_betas(const char* op, double beta1, double beta2) {
  check(beta1 >= 0 && beta1 < 1, op, ": beta1 must be in [0, 1), got ", beta1, ".");
  check(beta2 >= 0 && beta2 < 1, op, ": beta2 must be in [0, 1), got ", beta2, ".");
}

inline void check_step(const char* op, int64_t step) {
  check(step >= 1, op, ": step must be 1 for the first step, then more; got ", step, ".");
}

inline void check_not_negative(const char* op, const char* name, double value) {
  check(value >= 0, op, ": ", name, " must be >= 0, got ", value, ".");
}

}  // namespace apex
