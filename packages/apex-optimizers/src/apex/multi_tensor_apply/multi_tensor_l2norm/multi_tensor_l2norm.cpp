// Registers multi_tensor_l2norm: checks, types and launch; the mathematics is in math/l2norm.h.
#include "apex/engine/foreach_reduce.h"
#include "apex/math/l2norm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {
namespace {

std::tuple<Tensor, Tensor> multi_tensor_l2norm(const TensorList& inputs,
                                               const std::optional<Tensor>& flag, bool per_tensor,
                                               bool wide) {
  const char* op = "multi_tensor_l2norm";
  check(!inputs.empty(), op, ": inputs must hold at least one tensor, got none.");
  TensorTable table = make_table(op, {{"inputs", inputs}}, Empty::kKeep);
  const Tensor& like = inputs[0];
  int* flag_data = flag ? number_near<int>(op, "flag", *flag, like) : nullptr;
  ScalarType dtype = like.scalar_type();
  bool is_wide = wide || dtype == ScalarType::Double;
  auto result = is_wide ? ScalarType::Double : ScalarType::Float;
  int64_t numbers = per_tensor ? static_cast<int64_t>(inputs.size()) : 0;
  Context context(like);
  Tensor norm = empty(like, {1}, result);
  Tensor norms = empty(like, {numbers}, result);
  dispatch_floating(op, dtype, [&]<class S>() {
    auto reduce = [&]<class R>() {
      foreach_reduce<S>(context, table, L2Norm<compute_t<S>>{flag_data},
                        per_tensor ? data<R>(norms, "norms") : nullptr, data<R>(norm, "norm"));
    };
    is_wide ? reduce.template operator()<double>() : reduce.template operator()<float>();
  });
  return {norm, norms};
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) { m.impl("multi_tensor_l2norm", TORCH_BOX(&multi_tensor_l2norm)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
