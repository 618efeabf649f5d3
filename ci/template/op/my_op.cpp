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
Tensor my_op(const Tensor& x) {
  check_tensors("my_op", {{"x", x}});
  check(x.dim() > 0 && x.is_contiguous(), "my_op: x must be contiguous rows, got ", describe(x),
        ".");
  Tensor y = empty_like(x, x.scalar_type());
  if (x.numel() == 0) return y;
  int64_t columns = x.size(-1);
  Context context(x);
  dispatch_floating("my_op", x.scalar_type(), [&]<class S>() {
    rowwise(context, x.numel() / columns, columns, MyOp<S>{data<S>(x, "x"), data<S>(y, "y")});
  });
  return y;
}

}  // namespace

APEX_KERNELS(apex_my_package, m) { m.impl("my_op", TORCH_BOX(&my_op)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::my_package
