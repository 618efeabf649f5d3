// Registers norm_of_list and scale_list_: checks, types and launch; the mathematics is in
// clip_grad.h, apex/math/l2norm.h and apex/math/maxnorm.h.
#include "clip_grad.h"

#include "apex/engine/foreach.h"
#include "apex/engine/foreach_reduce.h"
#include "apex/math/l2norm.h"
#include "apex/math/maxnorm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

Tensor norm_of_list(const TensorList& tensors, bool largest) {
  const char* op = "norm_of_list";
  check(!tensors.empty(), op, ": tensors must hold at least one tensor, got none.");
  TensorTable table = make_table(op, {{"tensors", tensors}});
  const Tensor& like = tensors[0];
  Context context(like);
  Tensor norm = empty(like, {}, statistics_dtype(like));
  dispatch_floating(op, like.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    T* total = data<T>(norm, "norm");
    if (largest) {
      foreach_reduce<S>(context, table, MaxNorm<T>{}, static_cast<T*>(nullptr), total);
    } else {
      foreach_reduce<S>(context, table, L2Norm<T>{nullptr}, static_cast<T*>(nullptr), total);
    }
  });
  return norm;
}

void scale_list_(const TensorList& tensors, const Tensor& factor) {
  const char* op = "scale_list_";
  TensorTable table = make_table(op, {{"tensors", tensors, Use::kWritten}});
  if (tensors.empty()) return;
  const Tensor& like = tensors[0];
  dispatch_floating(op, like.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    const T* number = number_near<T>(op, "factor", factor, like);
    Context context(like);
    foreach<InOut<S>>(context, table, ScaleByNumber<T>{number});
  });
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("norm_of_list", TORCH_BOX(&norm_of_list));
  m.impl("scale_list_", TORCH_BOX(&scale_list_));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
