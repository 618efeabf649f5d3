// Registers sgd_step and its form with held lists: checks, types and launch; the mathematics is in
// math/sgd.h.
#include "apex/engine/foreach.h"
#include "apex/math/sgd.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/held_lists.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kOp = "sgd_step";

// Columns: [copies, ] params, grads [, momentum_buffers].
TensorTable sgd_table(const TensorList& params, const TensorList& grads, const TensorList& buffers,
                      const TensorList& copies) {
  NamedList p{"params", params}, g{"grads", grads}, m{"momentum_buffers", buffers},
      c{"copies", copies};
  if (copies.empty()) {
    return buffers.empty() ? make_table(kOp, {p, g}) : make_table(kOp, {p, g, m});
  }
  return buffers.empty() ? make_table(kOp, {c, p, g}) : make_table(kOp, {c, p, g, m});
}

// Calls body<P, G>() without copies: gradients have their parameter's dtype.
template <class Body>
void dispatch_plain(ScalarType param, ScalarType grad, Body&& body) {
  check(grad == param, kOp, ": params are ", dtype_name(param), ", but grads are ",
        dtype_name(grad), ". Gradients must have their parameter's dtype.");
  dispatch_floating(kOp, param, [&]<class P>() { body.template operator()<P, P>(); });
}

// Calls body<G, C>() for float32 parameters with 16-bit copies: gradients are of either dtype.
template <class Body>
void dispatch_copies(ScalarType param, ScalarType grad, ScalarType copy, Body&& body) {
  check(param == ScalarType::Float && (grad == param || grad == copy), kOp,
        ": with copies params must be float32, and grads float32 or of the copies' dtype, got "
        "params ",
        dtype_name(param), ", grads ", dtype_name(grad), ", copies ", dtype_name(copy), ".");
  auto with_copy = [&]<class C>() {
    grad == param ? body.template operator()<float, C>() : body.template operator()<C, C>();
  };
  if (copy == ScalarType::Half) return with_copy.template operator()<Half>();
  if (copy == ScalarType::BFloat16) return with_copy.template operator()<BFloat16>();
  fail(kOp, ": copies must be float16 or bfloat16, got ", dtype_name(copy), ".");
}

void sgd_step(const TensorList& params, const TensorList& grads, const TensorList& buffers,
              const TensorList& copies, double lr, const std::optional<Tensor>& device_lr,
              double momentum, double dampening, double weight_decay, bool nesterov,
              bool wd_after_momentum, bool first_run, double gradient_scale,
              const std::optional<Tensor>& noop_flag, std::optional<int64_t> rounding_key,
              int64_t rounding_step) {
  check_not_negative(kOp, "momentum", momentum);
  check(params.empty() || buffers.empty() == (momentum == 0), kOp,
        ": momentum_buffers must be given if momentum is not 0, and only then; got ",
        buffers.size(), " with momentum ", momentum, ".");
  TensorTable table = sgd_table(params, grads, buffers, copies);
  if (params.empty()) return;
  ScalarType dtype = params[0].scalar_type(), grad_dtype = grads[0].scalar_type();
  check(buffers.empty() || buffers[0].scalar_type() == dtype, kOp,
        ": momentum_buffers must have the dtype of params, ", dtype_name(dtype), ".");
  SgdHyper hyper{momentum, dampening,         weight_decay, gradient_scale,
                 nesterov, wd_after_momentum, first_run};
  const float* lr_data =
      device_lr ? number_near<float>(kOp, "device_lr", *device_lr, params[0]) : nullptr;
  const int* flag = noop_flag ? number_near<int>(kOp, "noop_flag", *noop_flag, params[0]) : nullptr;
  Context context(params[0]);
  if (rounding_key) {
    check(copies.empty() && dtype == ScalarType::BFloat16 && grad_dtype == dtype, kOp,
          ": only bfloat16 params without copies are rounded by chance, and their grads must be "
          "bfloat16, got ",
          dtype_name(dtype), " and ", dtype_name(grad_dtype), ".");
    SgdLaunch<float, Results::kStochasticRounding> launch{
        hyper,
        lr,
        lr_data,
        flag,
        {static_cast<uint64_t>(*rounding_key), static_cast<uint32_t>(rounding_step)}};
    using P = BFloat16;
    using C = CutBFloat16;
    if (buffers.empty()) return foreach<InOut<C>, In<P>>(context, table, launch);
    return foreach<InOut<C>, In<P>, InOut<P>>(context, table, launch);
  }
  if (copies.empty()) {
    dispatch_plain(dtype, grad_dtype, [&]<class P, class G>() {
      SgdLaunch<compute_t<P>, Results::kStore> launch{hyper, lr, lr_data, flag};
      if (buffers.empty()) return foreach<InOut<P>, In<G>>(context, table, launch);
      foreach<InOut<P>, In<G>, InOut<P>>(context, table, launch);
    });
    return;
  }
  dispatch_copies(dtype, grad_dtype, copies[0].scalar_type(), [&]<class G, class C>() {
    SgdLaunch<float, Results::kCopy> launch{hyper, lr, lr_data, flag};
    using P = InOut<float>;
    if (buffers.empty()) return foreach<Out<C>, P, In<G>>(context, table, launch);
    foreach<Out<C>, P, In<G>, InOut<float>>(context, table, launch);
  });
}

int64_t sgd_hold(TensorList& params, TensorList& grads, TensorList& buffers, TensorList& copies) {
  return hold_lists(params, grads, buffers, copies);
}

void sgd_step_held(int64_t held, int64_t held_grads, const TensorList& grads, double lr,
                   const std::optional<Tensor>& device_lr, double momentum, double dampening,
                   double weight_decay, bool nesterov, bool wd_after_momentum, bool first_run,
                   double gradient_scale, const std::optional<Tensor>& noop_flag,
                   std::optional<int64_t> rounding_key, int64_t rounding_step) {
  HeldCall own("sgd_step_held", held, held_grads, grads);
  sgd_step(own[0], own.grads(), own[2], own[3], lr, device_lr, momentum, dampening, weight_decay,
           nesterov, wd_after_momentum, first_run, gradient_scale, noop_flag, rounding_key,
           rounding_step);
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("sgd_step", TORCH_BOX(&sgd_step));
  m.impl("sgd_hold", TORCH_BOX(&sgd_hold));
  m.impl("sgd_release", TORCH_BOX(&release_lists));
  m.impl("sgd_held_count", TORCH_BOX(&held_count));
  m.impl("sgd_step_held", TORCH_BOX(&sgd_step_held));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
