// Ops with planted bugs: what the emulated GPU learns of tensors, by way of torch.
#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"

namespace apex::planted {
inline namespace APEX_BACKEND_NS {
namespace {

__global__ void copy(float* y, const float* x, int64_t count) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = x[i];
}

enum Bug { kNone, kOutOfBounds, kMissingTail, kFreed, kUninitialized, kHost, kWrongStream };

Tensor planted_copy(const Tensor& x, int64_t bug) {
  Context context(x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  const float* from = data<float>(x, "x");
  float* to = data<float>(y, "y");
  int64_t count = x.numel();
  std::vector<float> on_host(1 << 20);
  if (bug == kOutOfBounds) count += 1;
  if (bug == kMissingTail) count -= 1;
  if (bug == kHost) from = on_host.data() + 500000;
  if (bug == kUninitialized) from = static_cast<float*>(context.workspace(count * sizeof(float)));
  if (bug == kFreed) from = data<float>(torch::stable::new_empty(x, {1 << 20}), "temporary") + 9999;
  gpu_stream stream = bug == kWrongStream ? nullptr : context.stream();
  launch<copy>(dim3((static_cast<unsigned>(count) + 63) / 64), dim3(64), 0, stream, to, from,
               count);
  context.check_launch("copy");
  return y;
}

}  // namespace

APEX_KERNELS(apex_planted, m) { m.impl("planted_copy", TORCH_BOX(&planted_copy)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::planted
