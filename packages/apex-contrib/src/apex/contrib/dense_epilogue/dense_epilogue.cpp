// Registers what follows matrix products: checks, types and launch; the mathematics is in
// dense_epilogue.h.
#include "dense_epilogue.h"

#include <tuple>

#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

// The numbers of ReLU and sigmoid are Apex's.
enum Activation : int64_t { kRelu = 1, kSigmoid = 2, kGelu = 3 };

int64_t columns_of(const char* op, const char* name, const Tensor& x) {
  check(x.dim() > 0 && x.is_contiguous(), op, ": ", name, " must be contiguous rows, got ",
        describe(x), ".");
  return x.size(-1);
}

Tensor dense_gelu(const Tensor& x) {
  const char* op = "dense_gelu";
  check_tensors(op, {{"x", x}});
  int64_t columns = columns_of(op, "x", x);
  Tensor y = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    rowwise(context, columns ? x.numel() / columns : 0, columns,
            DenseGelu<S>{data<S>(x, "x"), data<S>(y, "y")});
  });
  return y;
}

std::tuple<Tensor, Tensor> dense_activation_backward(const Tensor& dy_of_any_layout,
                                                     const Tensor& saved, int64_t activation,
                                                     bool bias_grad) {
  const char* op = "dense_activation_backward";
  check_tensors(op, {{"dy", dy_of_any_layout}, {"saved", saved}});
  int64_t columns = columns_of(op, "saved", saved);
  check(kRelu <= activation && activation <= kGelu, op,
        ": activation must be 1 (ReLU), 2 (sigmoid) or 3 (GELU), got ", activation, ".");
  Tensor dy = as_contiguous(dy_of_any_layout);  // often one number, expanded
  check_sizes(op, {"dy", dy}, saved.sizes(), saved.scalar_type(), {"saved", saved});
  Tensor dx = empty_like(saved, saved.scalar_type());
  Tensor dbias = empty(saved, {bias_grad ? columns : 0}, saved.scalar_type());
  Context context(saved);
  dispatch_floating(op, saved.scalar_type(), [&]<class S>() {
    auto run = [&]<class Gradient>(Gradient) {
      rowwise_colwise(context, columns ? saved.numel() / columns : 0, columns, bias_grad,
                      DenseActivationBackward<S, Gradient>{
                          data<S>(dy, "dy"), data<S>(saved, "saved"), data<S>(dx, "dx"),
                          data<S>(dbias, "dbias"), bias_grad});
    };
    if (activation == kRelu) run(ReluGradient{});
    if (activation == kSigmoid) run(SigmoidGradient{});
    if (activation == kGelu) run(GeluGradient{});
  });
  return {dx, dbias};
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("dense_gelu", TORCH_BOX(&dense_gelu));
  m.impl("dense_activation_backward", TORCH_BOX(&dense_activation_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
