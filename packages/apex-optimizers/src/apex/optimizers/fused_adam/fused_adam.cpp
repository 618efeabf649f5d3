// Registers adam_step, its form with held lists and adam_step_capturable. registration.h has the
// checks of lists and dtypes and the launch, math/adam.h the mathematics.
#include "apex/torch/held_lists.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "registration.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

// Launches the step with kParts, and of the rest what the lists and numbers need.
template <int kParts>
void choose_adam(const AdamCall& call, const TensorTable& table) {
  call.check_dtypes();
  if (!call.largest.empty()) return launch_amsgrad(call, table, kParts);
  call.dispatch([&]<class P, class M>() {
    dispatch_bool(call.hyper.numbers.clip != nullptr, [&]<bool kClipped>() {
      constexpr int kOwn = kParts | (kClipped ? kClips : 0);
      if (call.masters.empty()) return launch_adam<kOwn, P, M>(call, table);
      launch_adam<kOwn | kMasters, P, M>(call, table);
    });
  });
}

void adam_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
               const TensorList& masters, double lr, double beta1, double beta2, double eps,
               double weight_decay, int64_t step, bool bias_correction, bool decoupled,
               bool maximize, const std::optional<Tensor>& clip,
               std::optional<int64_t> rounding_key) {
  const char* op = "adam_step";
  check_step(op, step);
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  AdamCall call{op,
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs,
                masters,
                maximize ? -1 : 1.,
                rounding_key.has_value()};
  TensorTable table = call.table();
  if (params.empty()) return;
  StepNumbers numbers = make_step_numbers(lr, step, {beta1, beta2, bias_correction});
  call.hyper = {beta1, beta2, eps, weight_decay, decoupled, numbers};
  call.hyper.numbers.clip = optional_number<double>(op, "clip", clip, params[0]);
  call.hyper.rounding = {static_cast<uint64_t>(rounding_key.value_or(0)),
                         static_cast<uint32_t>(step)};
  choose_adam<kPlainAdam>(call, table);
}

int64_t adam_hold(TensorList& params, TensorList& grads, TensorList& exp_avgs,
                  TensorList& exp_avg_sqs, TensorList& max_exp_avg_sqs, TensorList& masters) {
  return hold_lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters);
}

void adam_step_held(int64_t held, int64_t held_grads, const TensorList& grads, double lr,
                    double beta1, double beta2, double eps, double weight_decay, int64_t step,
                    bool bias_correction, bool decoupled, bool maximize,
                    const std::optional<Tensor>& clip, std::optional<int64_t> rounding_key) {
  HeldCall own("adam_step_held", held, held_grads, grads);
  adam_step(own[0], own.grads(), own[2], own[3], own[4], own[5], lr, beta1, beta2, eps,
            weight_decay, step, bias_correction, decoupled, maximize, clip, rounding_key);
}

void adam_step_capturable(const TensorList& params, const TensorList& grads,
                          const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                          const TensorList& max_exp_avg_sqs, const TensorList& masters,
                          const Tensor& lr, const Tensor& step,
                          const std::optional<Tensor>& inv_scale,
                          const std::optional<Tensor>& found_inf, double beta1, double beta2,
                          double eps, double weight_decay, bool bias_correction, bool decoupled,
                          bool maximize, const std::optional<Tensor>& clip,
                          std::optional<int64_t> rounding_key) {
  const char* op = "adam_step_capturable";
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  AdamCall call{op,
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs,
                masters,
                maximize ? -1 : 1.,
                rounding_key.has_value()};
  TensorTable table = call.table();
  if (params.empty()) return;
  call.hyper = {beta1, beta2, eps, weight_decay, decoupled, {}};
  StepNumbers& numbers = call.hyper.numbers;
  numbers.bias_correction = bias_correction;
  numbers.device_lr = number_near<float>(op, "lr", lr, params[0]);
  numbers.device_step = number_near<int>(op, "step", step, params[0]);
  numbers.inverse_scale = optional_number<float>(op, "inv_scale", inv_scale, params[0]);
  numbers.found_inf = optional_number<float>(op, "found_inf", found_inf, params[0]);
  numbers.clip = optional_number<double>(op, "clip", clip, params[0]);
  call.hyper.rounding.key = static_cast<uint64_t>(rounding_key.value_or(0));
  choose_adam<kUnscales>(call, table);
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("adam_step", TORCH_BOX(&adam_step));
  m.impl("adam_hold", TORCH_BOX(&adam_hold));
  m.impl("adam_release", TORCH_BOX(&release_lists));
  m.impl("adam_held_count", TORCH_BOX(&held_count));
  m.impl("adam_step_held", TORCH_BOX(&adam_step_held));
  m.impl("adam_step_capturable", TORCH_BOX(&adam_step_capturable));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
