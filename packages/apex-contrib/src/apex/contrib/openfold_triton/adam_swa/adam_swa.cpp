// Registers adam_swa_step: checks, types and launch; the mathematics is in adam_swa.h and
// math/adam.h.
#include "adam_swa.h"

#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

// Raises unless the list is float64, or of a type that kernels convert as they load.
void check_dtype(const char* op, const NamedList& list, bool is_double) {
  const ScalarType dtype = list.tensors[0].scalar_type();
  const Storage storage = storage_of(dtype);
  const bool is_small = storage != Storage::kOther && storage != Storage::kFloat8;
  check(is_double ? dtype == ScalarType::Double : is_small, op, ": ", list.name, " must be ",
        is_double ? "float64, as params" : "float32, float16 or bfloat16", ", got ",
        dtype_name(dtype), ".");
}

// Columns of S, but for gradients and copies of G.
template <class S, class G, class Context>
void launch_step(const Context& context, const TensorTable& table, const AdamHyper& hyper,
                 double grad_scale, double average_weight) {
  using State = InOut<S>;
  foreach<State, In<G>, State, State, Out<G>, State>(
      context, table, AdamSwaLaunch<S>{hyper, grad_scale, average_weight});
}

void adam_swa_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                   const TensorList& exp_avg_sqs, const TensorList& copies,
                   const TensorList& averages, const std::optional<Tensor>& device_scale,
                   double grad_scale, double lr, double beta1, double beta2, double eps,
                   double weight_decay, int64_t step, bool bias_correction, bool decoupled,
                   double average_weight) {
  const char* op = "adam_swa_step";
  check_step(op, step);
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  check(average_weight >= 0 && average_weight <= 1, op, ": average_weight must be in [0, 1], got ",
        average_weight, ".");
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, c{"copies", copies}, a{"averages", averages};
  TensorTable table = make_table(op, {p, g, m, v, c, a});
  if (params.empty()) return;
  const ScalarType dtype = params[0].scalar_type();
  const bool is_double = dtype == ScalarType::Double;
  check(is_double || dtype == ScalarType::Float, op, ": params must be float32 or float64, got ",
        dtype_name(dtype), ".");
  for (const NamedList& list : {m, v, a}) {
    check(list.tensors[0].scalar_type() == dtype, op, ": ", list.name, " must be ",
          dtype_name(dtype), ", as params, got ", dtype_name(list.tensors[0].scalar_type()), ".");
  }
  for (const NamedList& list : {g, c}) check_dtype(op, list, is_double);
  StepNumbers numbers = make_step_numbers(lr, step, {beta1, beta2, bias_correction});
  numbers.clip = optional_number<double>(op, "device_scale", device_scale, params[0]);
  const AdamHyper hyper{beta1, beta2, eps, weight_decay, decoupled, numbers};
  Context context(params[0]);
  if (is_double) {
    launch_step<double, double>(context, table, hyper, grad_scale, average_weight);
  } else {
    launch_step<float, AnyFloat>(context, table, hyper, grad_scale, average_weight);
  }
}

}  // namespace

APEX_KERNELS(apex_contrib, m) { m.impl("adam_swa_step", TORCH_BOX(&adam_swa_step)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
