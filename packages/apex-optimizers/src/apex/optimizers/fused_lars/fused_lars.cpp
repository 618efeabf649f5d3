// Registers lars_step: checks, types and launch; the mathematics is in lars.h.
#include "lars.h"

#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kOp = "lars_step";

// Columns: [copies, ] params, grads [, momentum_buffers]. Tensors without elements keep their rows:
// norms belong to indices of the lists.
TensorTable lars_table(const TensorList& params, const TensorList& grads, const TensorList& buffers,
                       const TensorList& copies) {
  NamedList p{"params", params}, g{"grads", grads}, m{"momentum_buffers", buffers},
      c{"copies", copies};
  if (copies.empty()) {
    return buffers.empty() ? make_table(kOp, {p, g}, Empty::kKeep)
                           : make_table(kOp, {p, g, m}, Empty::kKeep);
  }
  return buffers.empty() ? make_table(kOp, {c, p, g}, Empty::kKeep)
                         : make_table(kOp, {c, p, g, m}, Empty::kKeep);
}

// Calls body<P, G, C>() for the dtypes of parameters, gradients and copies; without copies C is P.
template <class Body>
void dispatch_lars(ScalarType param, ScalarType grad, std::optional<ScalarType> copy, Body&& body) {
  if (!copy) {
    check(grad == param, kOp, ": params are ", dtype_name(param), ", but grads are ",
          dtype_name(grad), ". Gradients must have their parameter's dtype.");
    return dispatch_floating(kOp, param, [&]<class P>() { body.template operator()<P, P, P>(); });
  }
  bool is_half = *copy == ScalarType::Half || *copy == ScalarType::BFloat16;
  check(param == ScalarType::Float && is_half && (grad == param || grad == *copy), kOp,
        ": with copies, of float16 or bfloat16, params must be float32, and grads float32 or of "
        "the copies' dtype; got params ",
        dtype_name(param), ", grads ", dtype_name(grad), ", copies ", dtype_name(*copy), ".");
  auto with_copy = [&]<class C>() {
    grad == param ? body.template operator()<float, float, C>()
                  : body.template operator()<float, C, C>();
  };
  if (*copy == ScalarType::Half) return with_copy.template operator()<Half>();
  with_copy.template operator()<BFloat16>();
}

// The tensor's memory, after a check that it holds a number per tensor beside `params`.
template <class T>
const T* norms_near(const char* name, const std::optional<Tensor>& norms,
                    const TensorList& params) {
  if (!norms) return nullptr;
  check_tensors(kOp, {{name, *norms}});
  const Tensor& like = params[0];
  bool is_near =
      norms->is_cpu() == like.is_cpu() && norms->get_device_index() == like.get_device_index();
  check(norms->numel() == static_cast<int64_t>(params.size()) && norms->is_contiguous() &&
            is_near && norms->scalar_type() == scalar_type_of<T>(),
        kOp, ": ", name, " must hold ", params.size(), " contiguous ",
        dtype_name(scalar_type_of<T>()), " numbers on the device of params, one per tensor; got ",
        describe(*norms), ".");
  return data<T>(*norms, name);
}

void lars_step(const TensorList& params, const TensorList& grads, const TensorList& buffers,
               const TensorList& copies, const std::optional<Tensor>& grad_norms,
               const std::optional<Tensor>& param_norms, double lr,
               const std::optional<Tensor>& device_lr, double trust_coefficient, double eps,
               double momentum, double weight_decay, bool nesterov, bool first_run,
               double gradient_scale, const std::optional<Tensor>& noop_flag) {
  check_not_negative(kOp, "momentum", momentum);
  check_not_negative(kOp, "eps", eps);
  check(params.empty() || buffers.empty() == (momentum == 0), kOp,
        ": momentum_buffers must be given if momentum is not 0, and only then; got ",
        buffers.size(), " with momentum ", momentum, ".");
  check(grad_norms.has_value() == param_norms.has_value(), kOp,
        ": grad_norms and param_norms must be given both, or neither.");
  TensorTable table = lars_table(params, grads, buffers, copies);
  if (params.empty()) return;
  ScalarType dtype = params[0].scalar_type();
  ScalarType moment = buffers.empty() ? dtype : buffers[0].scalar_type();
  check(moment == dtype || moment == ScalarType::Float, kOp,
        ": momentum_buffers must be float32 or of the dtype of params, ", dtype_name(dtype),
        "; got ", dtype_name(moment), ".");
  LarsHyper hyper{lr,  momentum,       weight_decay, trust_coefficient,
                  eps, gradient_scale, nesterov,     first_run};
  const float* lr_data =
      device_lr ? number_near<float>(kOp, "device_lr", *device_lr, params[0]) : nullptr;
  const int* flag = noop_flag ? number_near<int>(kOp, "noop_flag", *noop_flag, params[0]) : nullptr;
  std::optional<ScalarType> copy;
  if (!copies.empty()) copy = copies[0].scalar_type();
  Context context(params[0]);
  dispatch_lars(dtype, grads[0].scalar_type(), copy, [&]<class P, class G, class C>() {
    using T = compute_t<P>;
    const T* g = norms_near<T>("grad_norms", grad_norms, params);
    const T* p = norms_near<T>("param_norms", param_norms, params);
    auto run = [&]<class... Buffer>() {
      if constexpr (std::is_same_v<C, P>) {
        LarsLaunch<T, false> launch{hyper, g, p, lr_data, flag};
        foreach<InOut<P>, In<G>, InOut<Buffer>...>(context, table, launch);
      } else {
        LarsLaunch<T, true> launch{hyper, g, p, lr_data, flag};
        foreach<Out<C>, InOut<P>, In<G>, InOut<Buffer>...>(context, table, launch);
      }
    };
    if (buffers.empty()) return run();
    if (moment == dtype) return run.template operator()<P>();
    run.template operator()<float>();
  });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) { m.impl("lars_step", TORCH_BOX(&lars_step)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
