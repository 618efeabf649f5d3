// The numbers of an optimizer's step, on the host or on the device.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// A pointer that is not null is read in place of the number beside it: every replay of a captured
// graph then finds the learning rate, the step and the scale of that moment.
struct StepNumbers {
  double lr = 0;
  const float* device_lr = nullptr;
  // 1 - beta^step, or 1 without bias correction, as the host knows the step.
  bool bias_correction = true;
  double correction1 = 1, correction2 = 1;
  const int* device_step = nullptr;      // 1 for the first
  const float* inverse_scale = nullptr;  // of gradients; null: 1
  const double* clip = nullptr;          // gradients are multiplied by it, too; null: 1
  const float* found_inf = nullptr;      // not 0: nothing is changed; null: 0

  APEX_HD bool skip() const { return found_inf != nullptr && *found_inf != 0; }

  APEX_HD double learning_rate() const {
    return device_lr != nullptr ? static_cast<double>(*device_lr) : lr;
  }

  APEX_HD double gradient_scale() const {
    return inverse_scale != nullptr ? static_cast<double>(*inverse_scale) : 1;
  }

  APEX_HD double clip_factor() const { return clip != nullptr ? *clip : 1; }

  // 1 - beta^step, given what the host computed from the step it knows.
  APEX_HD double correction(double beta, double on_host) const {
    if (device_step == nullptr || !bias_correction) return on_host;
    return 1 - pow(beta, static_cast<double>(*device_step));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
