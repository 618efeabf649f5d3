// Registers clip_grad_total_norm and clip_grad_: checks, types and launch.
#include <cmath>

#include "apex/engine/foreach.h"
#include "apex/engine/foreach_reduce.h"
#include "apex/math/l1norm.h"
#include "apex/math/l2norm.h"
#include "apex/math/maxnorm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"
#include "clip.h"

namespace apex::clip_grad {
inline namespace APEX_BACKEND_NS {
namespace {

Tensor clip_grad_total_norm(const TensorList& grads, double norm_type) {
  const char* op = "clip_grad_total_norm";
  check(!grads.empty(), op, ": grads must hold at least one tensor, got none.");
  bool is_max = std::isinf(norm_type) && norm_type > 0;
  check(is_max || norm_type == 1 || norm_type == 2, op, ": norm_type must be 1, 2 or inf, got ",
        norm_type, ".");
  TensorTable table = make_table(op, {{"grads", grads}}, Empty::kKeep);
  const Tensor& like = grads[0];
  Context context(like);
  Tensor norm = empty(like, {1}, ScalarType::Double);
  double* total = data<double>(norm, "norm");
  dispatch_floating(op, like.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    double* per_tensor = nullptr;
    if (is_max) {
      foreach_reduce<S>(context, table, MaxNorm<T>{}, per_tensor, total);
    } else if (norm_type == 1) {
      foreach_reduce<S>(context, table, L1Norm<T>{}, per_tensor, total);
    } else {
      foreach_reduce<S>(context, table, L2Norm<T>{nullptr}, per_tensor, total);
    }
  });
  return norm;
}

void clip_grad_(const TensorList& grads, const Tensor& norm, double max_norm) {
  const char* op = "clip_grad_";
  TensorTable table = make_table(op, {{"grads", grads, Use::kWritten}});
  if (grads.empty()) return;
  const double* number = number_near<double>(op, "norm", norm, grads[0]);
  Context context(grads[0]);
  dispatch_floating(op, grads[0].scalar_type(), [&]<class S>() {
    foreach<InOut<S>>(context, table, ClipByNorm<compute_t<S>>{number, max_norm});
  });
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("clip_grad_total_norm", TORCH_BOX(&clip_grad_total_norm));
  m.impl("clip_grad_", TORCH_BOX(&clip_grad_));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::clip_grad
