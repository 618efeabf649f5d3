// Registers multi_tensor_scale_squares: checks, types and launch.
#include "apex/engine/foreach_fold.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"
#include "scale_squares.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {
namespace {

Tensor multi_tensor_scale_squares(const TensorList& inputs, const TensorList& outputs,
                                  double scale) {
  const char* op = "multi_tensor_scale_squares";
  check(!inputs.empty(), op, ": inputs must hold at least one tensor, got none.");
  TensorTable table = make_table(
      op, {{"inputs", inputs, Use::kRead}, {"outputs", outputs, Use::kWritten}}, Empty::kKeep);
  Context context(inputs[0]);
  Tensor squares = empty(inputs[0], {static_cast<int64_t>(inputs.size())}, ScalarType::Double);
  dispatch_floating(op, inputs[0].scalar_type(), [&]<class S>() {
    dispatch_floating(op, outputs[0].scalar_type(), [&]<class O>() {
      using T = std::conditional_t<std::is_same_v<O, double>, double, compute_t<S>>;
      foreach_fold<1, In<S>, Out<O>>(context, table, ScaleSquares<T>{static_cast<T>(scale)},
                                     data<double>(squares, "squares"));
    });
  });
  return squares;
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("multi_tensor_scale_squares", TORCH_BOX(&multi_tensor_scale_squares));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
