// Registers masters_sgd_step: checks, types and launch; the mathematics is in math/sgd.h.
#include "apex/engine/foreach.h"
#include "apex/math/sgd.h"
#include "apex/torch/context.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::legacy_sgd {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kOp = "masters_sgd_step";

void check_storage(const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  Storage storage = storage_of(dtype);
  check(storage != Storage::kOther && storage != Storage::kFloat8, kOp, ": ", list.name,
        " must be float32, float16 or bfloat16, got ", dtype_name(dtype), ".");
}

void check_float(const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  check(dtype == ScalarType::Float, kOp, ": ", list.name, " must be float32, got ",
        dtype_name(dtype), ".");
}

void masters_sgd_step(const TensorList& params, const TensorList& grads, const TensorList& buffers,
                      const TensorList& copies, double lr, double momentum, double dampening,
                      double weight_decay, bool nesterov, bool wd_after_momentum, bool first_run,
                      double gradient_scale) {
  check_not_negative(kOp, "momentum", momentum);
  check(params.empty() || buffers.empty() == (momentum == 0), kOp,
        ": momentum_buffers must be given if momentum is not 0, and only then; got ",
        buffers.size(), " with momentum ", momentum, ".");
  NamedList p{"params", params}, g{"grads", grads}, m{"momentum_buffers", buffers},
      c{"copies", copies};
  TensorTable table = buffers.empty() ? make_table(kOp, {c, p, g}) : make_table(kOp, {c, p, g, m});
  if (params.empty()) return;
  check_float(p);
  check_storage(g);
  check_storage(c);
  if (!buffers.empty()) check_float(m);
  SgdLaunch<float, Results::kCopy> launch{
      {momentum, dampening, weight_decay, gradient_scale, nesterov, wd_after_momentum, first_run},
      lr,
      nullptr,
      nullptr};
  Context context(params[0]);
  using Copy = Out<AnyFloat>;
  using Read = In<AnyFloat>;
  using Wide = InOut<float>;
  if (buffers.empty()) {
    foreach<Copy, Wide, Read>(context, table, launch);
  } else {
    foreach<Copy, Wide, Read, Wide>(context, table, launch);
  }
}

}  // namespace

APEX_KERNELS(apex_contrib, m) { m.impl("masters_sgd_step", TORCH_BOX(&masters_sgd_step)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::legacy_sgd
