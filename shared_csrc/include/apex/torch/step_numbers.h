// StepNumbers from the arguments of an operator.
#pragma once

#include <cmath>
#include <optional>

#include "apex/core/step_numbers.h"
#include "apex/torch/dispatch.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class S>
const S* optional_number(const char* op, const char* name, const std::optional<Tensor>& number,
                         const Tensor& like) {
  return number ? number_near<S>(op, name, *number, like) : nullptr;
}

struct Decays {
  double beta1, beta2;
  bool bias_correction;
};

inline StepNumbers make_step_numbers(double lr, int64_t step, const Decays& decays) {
  StepNumbers numbers;
  numbers.lr = lr;
  numbers.bias_correction = decays.bias_correction;
  if (decays.bias_correction) {
    numbers.correction1 = 1 - std::pow(decays.beta1, static_cast<double>(step));
    numbers.correction2 = 1 - std::pow(decays.beta2, static_cast<double>(step));
  }
  return numbers;
}

// Each has one element, on the device of `like`; lr, inv_scale and found_inf float32, step int32.
struct DeviceNumbers {
  const std::optional<Tensor>&lr, &step, &inv_scale, &found_inf;
  const char* name_of_scale = "inv_scale";
};

inline void set_device_numbers(const char* op, StepNumbers& numbers, const DeviceNumbers& given,
                               const Tensor& like) {
  numbers.device_lr = optional_number<float>(op, "device_lr", given.lr, like);
  numbers.device_step = optional_number<int>(op, "device_step", given.step, like);
  numbers.inverse_scale = optional_number<float>(op, given.name_of_scale, given.inv_scale, like);
  numbers.found_inf = optional_number<float>(op, "found_inf", given.found_inf, like);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
