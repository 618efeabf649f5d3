// Registers novograd_step: checks, types and launches; the mathematics is in novograd.h.
#include "novograd.h"

#include "apex/engine/foreach.h"
#include "apex/engine/foreach_reduce.h"
#include "apex/math/l2norm.h"
#include "apex/math/maxnorm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "novograd_step";

// The gradients' norms, per tensor, on the device.
template <class G>
double* grad_norms(const Context& context, const TensorTable& grads, bool is_max_norm) {
  using T = compute_t<G>;
  double* norms = static_cast<double*>(context.workspace(grads.tensors() * sizeof(double)));
  double* no_total = nullptr;
  if (is_max_norm) {
    foreach_reduce<G>(context, grads, MaxNorm<T>{}, norms, no_total);
  } else {
    foreach_reduce<G>(context, grads, L2Norm<T>{nullptr}, norms, no_total);
  }
  return norms;
}

// The running norms as one more list, of a single tensor.
template <class N>
void blend(const Context& context, N* norms, double* grad_norms, int64_t tensors,
           const NovoGradHyper& hyper) {
  TensorTable table;
  table.columns = 2;
  table.data = {norms, grad_norms};
  table.numel = {tensors};
  foreach<InOut<N>, In<double>>(context, table, BlendAllNorms{hyper});
}

void check_norms(const char* name, const Tensor& norms, const TensorList& params) {
  check_tensors(kOp, {{name, norms}});
  const Tensor& like = params[0];
  bool is_near =
      norms.is_cpu() == like.is_cpu() && norms.get_device_index() == like.get_device_index();
  check(norms.numel() == static_cast<int64_t>(params.size()) && norms.is_contiguous() && is_near,
        kOp, ": ", name, " must hold ", params.size(),
        " contiguous numbers on the device of params, one per tensor; got ", describe(norms), ".");
}

// Calls body<P, M, N>() for the dtypes of parameters, moments and norms.
template <class Body>
void dispatch_novograd(ScalarType param, ScalarType moment, ScalarType norm, Body&& body) {
  bool is_norm = norm == ScalarType::Float || norm == param;
  check((moment == ScalarType::Float || moment == param) && is_norm, kOp, ": for params of ",
        dtype_name(param),
        " exp_avgs must be of that dtype or float32, and norms float32 or, for float64, float64; "
        "got exp_avgs ",
        dtype_name(moment), ", norms ", dtype_name(norm), ".");
  dispatch_floating(kOp, param, [&]<class P>() {
    auto with_moment = [&]<class M>() {
      if constexpr (std::is_same_v<P, double>) {
        if (norm == ScalarType::Double) return body.template operator()<P, M, double>();
      }
      check(norm == ScalarType::Float, kOp, ": norms must be float32, got ", dtype_name(norm), ".");
      body.template operator()<P, M, float>();
    };
    if (moment == param) return with_moment.template operator()<P>();
    with_moment.template operator()<float>();
  });
}

void novograd_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                   const Tensor& norms, double lr, double beta1, double beta2, double eps,
                   double weight_decay, int64_t step, bool bias_correction, bool grad_averaging,
                   bool reg_inside_moment, bool is_max_norm, bool first_run, bool maximize,
                   const OptionalTensor& given_norms, const OptionalTensor& device_lr,
                   const OptionalTensor& device_step, const OptionalTensor& inv_scale,
                   const OptionalTensor& found_inf) {
  if (!device_step) check_step(kOp, step);
  check_betas(kOp, beta1, beta2);
  check_not_negative(kOp, "eps", eps);
  // Tensors without elements keep their rows: norms belong to indices of the lists.
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs};
  TensorTable table = make_table(kOp, {p, g, m}, Empty::kKeep);
  if (params.empty()) return;
  TensorTable grad_table = make_table(kOp, {g}, Empty::kKeep);
  check_norms("norms", norms, params);
  if (given_norms) {
    check_norms("grad_norms", *given_norms, params);
    check(given_norms->scalar_type() == ScalarType::Double, kOp,
          ": grad_norms must be float64, got ", dtype_name(given_norms->scalar_type()), ".");
  }
  ScalarType dtype = params[0].scalar_type();
  check(grads[0].scalar_type() == dtype, kOp, ": params are ", dtype_name(dtype),
        ", but grads are ", dtype_name(grads[0].scalar_type()),
        ". Gradients must have their parameter's dtype.");
  NovoGradHyper hyper{beta1,    beta2,     eps, weight_decay, grad_averaging, is_max_norm,
                      maximize, first_run, {}};
  hyper.numbers = make_step_numbers(lr, step, {beta1, beta2, bias_correction});
  set_device_numbers(kOp, hyper.numbers, {device_lr, device_step, inv_scale, found_inf}, params[0]);
  Context context(params[0]);
  dispatch_novograd(
      dtype, exp_avgs[0].scalar_type(), norms.scalar_type(), [&]<class P, class M, class N>() {
        N* running = data<N>(norms, "norms");
        double* own = given_norms ? data<double>(*given_norms, "grad_norms")
                                  : grad_norms<P>(context, grad_table, is_max_norm);
        blend(context, running, own, table.tensors(), hyper);
        dispatch_bool(reg_inside_moment, [&]<bool kInside>() {
          foreach<InOut<P>, In<P>, InOut<M>>(
              context, table, NovoGradSteps<compute_t<P>, N, kInside>{hyper, running});
        });
      });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) { m.impl("novograd_step", TORCH_BOX(&novograd_step)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
