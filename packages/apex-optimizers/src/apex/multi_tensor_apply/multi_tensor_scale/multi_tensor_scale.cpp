// Registers multi_tensor_scale: checks, types and launch; the mathematics is in math/scale.h.
#include "apex/engine/foreach.h"
#include "apex/math/scale.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {
namespace {

void multi_tensor_scale(const TensorList& inputs, const TensorList& outputs, const Tensor& flag,
                        double scale) {
  const char* op = "multi_tensor_scale";
  TensorTable table =
      make_table(op, {{"inputs", inputs, Use::kRead}, {"outputs", outputs, Use::kWritten}});
  if (inputs.empty()) return;
  int* flag_data = number_near<int>(op, "flag", flag, inputs[0]);
  Context context(inputs[0]);
  dispatch_floating(op, inputs[0].scalar_type(), [&]<class In_>() {
    dispatch_floating(op, outputs[0].scalar_type(), [&]<class Out_>() {
      using T = std::conditional_t<std::is_same_v<Out_, double>, double, compute_t<In_>>;
      foreach<In<In_>, Out<Out_>>(context, table, Scale<T>{static_cast<T>(scale), flag_data});
    });
  });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) { m.impl("multi_tensor_scale", TORCH_BOX(&multi_tensor_scale)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
