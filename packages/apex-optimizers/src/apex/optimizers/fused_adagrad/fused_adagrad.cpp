// Registers adagrad_step and its form with held lists: checks, types and launch; the mathematics is
// in adagrad.h.
#include "adagrad.h"

#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/held_lists.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kOp = "adagrad_step";

void adagrad_step(const TensorList& params, const TensorList& grads, const TensorList& sums,
                  double lr, double eps, double weight_decay, bool decoupled, bool maximize) {
  check_not_negative(kOp, "eps", eps);
  TensorTable table = make_table(kOp, {{"params", params}, {"grads", grads}, {"sums", sums}});
  if (params.empty()) return;
  ScalarType dtype = params[0].scalar_type(), sum_dtype = sums[0].scalar_type();
  check(grads[0].scalar_type() == dtype, kOp, ": params are ", dtype_name(dtype),
        ", but grads are ", dtype_name(grads[0].scalar_type()),
        ". Gradients must have their parameter's dtype.");
  Context context(params[0]);
  dispatch_floating(kOp, dtype, [&]<class P>() {
    using T = compute_t<P>;
    auto run = [&]<class M>() {
      dispatch_bool(decoupled, [&]<bool kDecoupled>() {
        AdagradStep<T, kDecoupled> step{static_cast<T>(lr), static_cast<T>(eps),
                                        static_cast<T>(weight_decay), maximize ? T(-1) : T(1)};
        foreach<InOut<P>, In<P>, InOut<M>>(context, table, step);
      });
    };
    if (sum_dtype == dtype) return run.template operator()<P>();
    if (sum_dtype == ScalarType::Float) return run.template operator()<float>();
    fail(kOp, ": sums must be float32 or of the dtype of params, ", dtype_name(dtype), "; got ",
         dtype_name(sum_dtype), ".");
  });
}

int64_t adagrad_hold(TensorList& params, TensorList& grads, TensorList& sums) {
  return hold_lists(params, grads, sums);
}

void adagrad_step_held(int64_t held, int64_t held_grads, const TensorList& grads, double lr,
                       double eps, double weight_decay, bool decoupled, bool maximize) {
  HeldCall own("adagrad_step_held", held, held_grads, grads);
  adagrad_step(own[0], own.grads(), own[2], lr, eps, weight_decay, decoupled, maximize);
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("adagrad_step", TORCH_BOX(&adagrad_step));
  m.impl("adagrad_hold", TORCH_BOX(&adagrad_hold));
  m.impl("adagrad_release", TORCH_BOX(&release_lists));
  m.impl("adagrad_held_count", TORCH_BOX(&held_count));
  m.impl("adagrad_step_held", TORCH_BOX(&adagrad_step_held));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
