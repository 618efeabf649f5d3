// Registers my_op: checks, types and launch; the mathematics is in my_op.h.
#include "my_op.h"

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::my_package {
inline namespace APEX_BACKEND_NS {
namespace {

// Rows are the last dimension of x, which Python has made contiguous.
Tensor my_op_forward(const Tensor& x) {
  check_tensors("my_op_forward", {{"x", x}});
  check(x.dim() > 0 && x.is_contiguous(), "my_op_forward: x must be contiguous rows, got ",
        describe(x), ".");
  Tensor y = empty_like(x, x.scalar_type());
  if (x.numel() == 0) return y;
  int64_t columns = x.size(-1);
  Context context(x);
  dispatch_floating("my_op_forward", x.scalar_type(), [&]<class S>() {
    rowwise(context, x.numel() / columns, columns,
            MyOpForward<S>{data<S>(x, "x"), data<S>(y, "y")});
  });
  return y;
}

Tensor my_op_backward(const Tensor& dy_of_any_layout, const Tensor& x) {
  check_tensors("my_op_backward", {{"x", x}, {"dy", dy_of_any_layout}});
  check(x.dim() > 0 && x.is_contiguous(), "my_op_backward: x must be contiguous rows, got ",
        describe(x), ".");
  Tensor dy = as_contiguous(dy_of_any_layout);  // often one number, expanded
  check_sizes("my_op_backward", {"dy", dy}, x.sizes(), x.scalar_type(), {"x", x});
  Tensor dx = empty_like(x, x.scalar_type());
  if (x.numel() == 0) return dx;
  int64_t columns = x.size(-1);
  Context context(x);
  dispatch_floating("my_op_backward", x.scalar_type(), [&]<class S>() {
    rowwise(context, x.numel() / columns, columns,
            MyOpBackward<S>{data<S>(dy, "dy"), data<S>(x, "x"), data<S>(dx, "dx")});
  });
  return dx;
}

}  // namespace

APEX_KERNELS(apex_my_package, m) {
  m.impl("my_op_forward", TORCH_BOX(&my_op_forward));
  m.impl("my_op_backward", TORCH_BOX(&my_op_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::my_package
