// Registers multi_tensor_scale_norms: checks, types and launch.
#include <tuple>

#include "apex/engine/foreach_fold.h"
#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"
#include "scale_squares.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {
namespace {

std::tuple<Tensor, Tensor> multi_tensor_scale_norms(const TensorList& inputs,
                                                    const TensorList& outputs, const Tensor& flag,
                                                    double scale, bool per_tensor) {
  const char* op = "multi_tensor_scale_norms";
  check(!inputs.empty(), op, ": inputs must hold at least one tensor, got none.");
  TensorTable table = make_table(
      op, {{"inputs", inputs, Use::kRead}, {"outputs", outputs, Use::kWritten}}, Empty::kKeep);
  const Tensor& like = inputs[0];
  int* flag_data = number_near<int>(op, "flag", flag, like);
  const ScalarType dtype = like.scalar_type();
  const ScalarType result = dtype == ScalarType::Double ? dtype : ScalarType::Float;
  const int64_t tensors = table.tensors();
  Context context(like);
  Tensor squares = empty(like, {tensors}, ScalarType::Double), norm = empty(like, {1}, result);
  Tensor norms = empty(like, {per_tensor ? tensors : 0}, result);
  double* sums = data<double>(squares, "squares");
  dispatch_floating(op, dtype, [&]<class S>() {
    using R = compute_t<S>;
    dispatch_floating(op, outputs[0].scalar_type(), [&]<class O>() {
      using T = std::conditional_t<std::is_same_v<O, double>, double, R>;
      foreach_fold<1, In<S>, Out<O>>(context, table, ScaleSquares<T>{static_cast<T>(scale)}, sums);
    });
    rowwise(context, 1, tensors,
            RootsOfSquares<R>{sums, data<R>(norm, "norm"),
                              per_tensor ? data<R>(norms, "norms") : nullptr, flag_data});
  });
  return {norm, norms};
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("multi_tensor_scale_norms", TORCH_BOX(&multi_tensor_scale_norms));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
