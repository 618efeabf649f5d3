// Registers adam_step, its form with held lists and adam_step_capturable: checks, types and launch;
// the mathematics is in math/adam.h.
#include "apex/engine/foreach.h"
#include "apex/math/adam.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/held_lists.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

TensorTable adam_table(const char* op, const TensorList& params, const TensorList& grads,
                       const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                       const TensorList& masters) {
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, w{"masters", masters};
  return masters.empty() ? make_table(op, {p, g, m, v}) : make_table(op, {p, g, m, v, w});
}

// Calls body<P, M>() for the dtypes of parameters P and moments M.
template <class Body>
void dispatch_adam(const char* op, const TensorList& params, const TensorList& grads,
                   const TensorList& exp_avgs, const TensorList& exp_avg_sqs, Body&& body) {
  ScalarType moment = exp_avgs[0].scalar_type();
  check(exp_avg_sqs[0].scalar_type() == moment, op, ": exp_avgs are ", dtype_name(moment),
        ", but exp_avg_sqs are ", dtype_name(exp_avg_sqs[0].scalar_type()), ".");
  check(grads[0].scalar_type() == params[0].scalar_type(), op, ": params are ",
        dtype_name(params[0].scalar_type()), ", but grads are ", dtype_name(grads[0].scalar_type()),
        ". Gradients must have their parameter's dtype.");
  dispatch_floating(op, params[0].scalar_type(), [&]<class P>() {
    if (moment == ScalarType::Float) return body.template operator()<P, float>();
    if constexpr (std::is_same_v<P, double>) {
      if (moment == ScalarType::Double) return body.template operator()<P, double>();
    }
    fail(op, ": exp_avgs must be float32 (or float64 for float64 params), got ", dtype_name(moment),
         ".");
  });
}

// Launches the step with what it needs: kParts, and of the rest what the arguments have.
template <int kParts, class P, class M>
void launch_adam(const char* op, const Context& context, const TensorTable& table,
                 const AdamHyper& hyper, double sign, bool rounds) {
  using G = std::conditional_t<(kParts & kUnscales) != 0, InOut<P>, In<P>>;
  if constexpr ((kParts & kMasters) != 0) {
    check(!rounds, op,
          ": rounding_key rounds params without masters by chance, but there are some.");
    foreach<Out<P>, G, InOut<M>, InOut<M>, InOut<float>>(context, table,
                                                         AdamLaunch<P, kParts>{hyper, sign});
  } else if constexpr (std::is_same_v<P, BFloat16>) {
    if (rounds) {
      return foreach<InOut<CutBFloat16>, G, InOut<M>, InOut<M>>(
          context, table, AdamLaunch<P, kParts | kByChance>{hyper, sign});
    }
    foreach<InOut<P>, G, InOut<M>, InOut<M>>(context, table, AdamLaunch<P, kParts>{hyper, sign});
  } else {
    check(!rounds, op, ": only bfloat16 params are rounded by chance.");
    foreach<InOut<P>, G, InOut<M>, InOut<M>>(context, table, AdamLaunch<P, kParts>{hyper, sign});
  }
}

// kParts with what depends on the arguments.
template <int kParts, class P, class M>
void choose_adam(const char* op, const Context& context, const TensorTable& table,
                 const AdamHyper& hyper, double sign, bool rounds, const TensorList& masters) {
  dispatch_bool(hyper.numbers.clip != nullptr, [&]<bool kClipped>() {
    constexpr int kOwn = kParts | (kClipped ? kClips : 0);
    if (masters.empty()) {
      return launch_adam<kOwn, P, M>(op, context, table, hyper, sign, rounds);
    }
    check(masters[0].scalar_type() == ScalarType::Float, op, ": masters must be float32, got ",
          dtype_name(masters[0].scalar_type()), ".");
    launch_adam<kOwn | kMasters, P, M>(op, context, table, hyper, sign, rounds);
  });
}

void adam_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& masters, double lr, double beta1,
               double beta2, double eps, double weight_decay, int64_t step, bool bias_correction,
               bool decoupled, bool maximize, const std::optional<Tensor>& clip,
               std::optional<int64_t> rounding_key) {
  const char* op = "adam_step";
  check_step(op, step);
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  TensorTable table = adam_table(op, params, grads, exp_avgs, exp_avg_sqs, masters);
  if (params.empty()) return;
  AdamHyper hyper{beta1,     beta2,
                  eps,       weight_decay,
                  decoupled, make_step_numbers(lr, step, {beta1, beta2, bias_correction})};
  hyper.numbers.clip = optional_number<double>(op, "clip", clip, params[0]);
  hyper.chance = {static_cast<uint64_t>(rounding_key.value_or(0)), static_cast<uint32_t>(step)};
  Context context(params[0]);
  dispatch_adam(op, params, grads, exp_avgs, exp_avg_sqs, [&]<class P, class M>() {
    choose_adam<kPlainAdam, P, M>(op, context, table, hyper, maximize ? -1 : 1,
                                  rounding_key.has_value(), masters);
  });
}

int64_t adam_hold(TensorList& params, TensorList& grads, TensorList& exp_avgs,
                  TensorList& exp_avg_sqs, TensorList& masters) {
  return hold_lists(params, grads, exp_avgs, exp_avg_sqs, masters);
}

void adam_step_held(int64_t held, int64_t held_grads, const TensorList& grads, double lr,
                    double beta1, double beta2, double eps, double weight_decay, int64_t step,
                    bool bias_correction, bool decoupled, bool maximize,
                    const std::optional<Tensor>& clip, std::optional<int64_t> rounding_key) {
  HeldCall own("adam_step_held", held, held_grads, grads);
  adam_step(own[0], own.grads(), own[2], own[3], own[4], lr, beta1, beta2, eps, weight_decay, step,
            bias_correction, decoupled, maximize, clip, rounding_key);
}

void adam_step_capturable(const TensorList& params, const TensorList& grads,
                          const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                          const TensorList& masters, const Tensor& lr, const Tensor& step,
                          const std::optional<Tensor>& inv_scale,
                          const std::optional<Tensor>& found_inf, double beta1, double beta2,
                          double eps, double weight_decay, bool bias_correction, bool decoupled,
                          bool maximize, const std::optional<Tensor>& clip,
                          std::optional<int64_t> rounding_key) {
  const char* op = "adam_step_capturable";
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  TensorTable table = adam_table(op, params, grads, exp_avgs, exp_avg_sqs, masters);
  if (params.empty()) return;
  AdamHyper hyper{beta1, beta2, eps, weight_decay, decoupled, {}};
  hyper.numbers.bias_correction = bias_correction;
  hyper.numbers.device_lr = number_near<float>(op, "lr", lr, params[0]);
  hyper.numbers.device_step = number_near<int>(op, "step", step, params[0]);
  hyper.numbers.inverse_scale = optional_number<float>(op, "inv_scale", inv_scale, params[0]);
  hyper.numbers.found_inf = optional_number<float>(op, "found_inf", found_inf, params[0]);
  hyper.numbers.clip = optional_number<double>(op, "clip", clip, params[0]);
  hyper.chance.key = static_cast<uint64_t>(rounding_key.value_or(0));
  Context context(params[0]);
  dispatch_adam(op, params, grads, exp_avgs, exp_avg_sqs, [&]<class P, class M>() {
    choose_adam<kUnscales, P, M>(op, context, table, hyper, maximize ? -1 : 1,
                                 rounding_key.has_value(), masters);
  });
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
