// Registers the softmaxes of attention scores: checks, types and launch; the mathematics is in
// scaled_softmax.h.
#include "scaled_softmax.h"

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {
namespace {

// Rows, after the checks that make walking [rows, columns] safe.
int64_t rows_of(const char* op, const char* name, const Tensor& x, bool causal) {
  check_tensors(op, {{name, x}});
  check(x.dim() >= (causal ? 2 : 1) && x.is_contiguous(), op, ": ", name,
        " must be contiguous rows, got ", describe(x), ".");
  check(!causal || x.size(-1) == x.size(-2), op, ": ", name, " must be squares [..., s, s], got ",
        describe(x), ".");
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

template <Scores kScores>
Tensor forward(const char* op, const Tensor& x, double scale) {
  int64_t rows = rows_of(op, "x", x, kScores == Scores::kCausal);
  Tensor y = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    rowwise(context, rows, x.size(-1),
            ScaledSoftmax<S, kScores>{data<S>(x, "x"), data<S>(y, "y"),
                                      static_cast<compute_t<S>>(scale)});
  });
  return y;
}

template <Scores kScores>
Tensor backward(const char* op, const Tensor& dy_of_any_layout, const Tensor& y, double scale) {
  int64_t rows = rows_of(op, "y", y, kScores == Scores::kCausal);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);  // often one number, expanded
  check_sizes(op, {"dy", dy}, y.sizes(), y.scalar_type(), {"y", y});
  Tensor dx = empty_like(y, y.scalar_type());
  Context context(y);
  dispatch_floating(op, y.scalar_type(), [&]<class S>() {
    rowwise(context, rows, y.size(-1),
            ScaledSoftmaxBackward<S, kScores>{data<S>(dy, "dy"), data<S>(y, "y"), data<S>(dx, "dx"),
                                              static_cast<compute_t<S>>(scale)});
  });
  return dx;
}

Tensor scaled_softmax_forward(const Tensor& x, double scale) {
  return forward<Scores::kAll>("scaled_softmax_forward", x, scale);
}

Tensor scaled_softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  return backward<Scores::kAll>("scaled_softmax_backward", dy, y, scale);
}

Tensor causal_softmax_forward(const Tensor& x, double scale) {
  return forward<Scores::kCausal>("causal_softmax_forward", x, scale);
}

Tensor causal_softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  return backward<Scores::kCausal>("causal_softmax_backward", dy, y, scale);
}

Tensor masked_softmax_forward(const Tensor& x, const Tensor& mask, double scale) {
  const char* op = "masked_softmax_forward";
  int64_t rows = rows_of(op, "x", x, false);
  check_tensors(op, {{"mask", mask}});
  check(x.dim() == 4 && mask.dim() == 4 && mask.size(0) == x.size(0) && mask.size(1) == 1 &&
            mask.size(2) == x.size(2) && mask.size(3) == x.size(3),
        op, ": mask must be [b, 1, sq, sk] for x [b, heads, sq, sk], got ", describe(mask), " for ",
        describe(x), ".");
  check(mask.stride(3) == 1 && mask.stride(2) == mask.size(3), op,
        ": mask must be contiguous but for its first dimension, got ", describe(mask), ".");
  check(mask.scalar_type() == ScalarType::Bool || mask.scalar_type() == ScalarType::Byte, op,
        ": mask must be bool or uint8, got ", dtype_name(mask.scalar_type()), ".");
  check(mask.is_cpu() == x.is_cpu() && mask.get_device_index() == x.get_device_index(), op,
        ": mask must be on the device of x; got ", describe(mask), ", x is ", describe(x), ".");
  Tensor y = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    rowwise(context, rows, x.size(3),
            MaskedSoftmax<S>{data<S>(x, "x"), mask_data(mask, "mask"), data<S>(y, "y"), x.size(1),
                             x.size(2), mask.stride(0), static_cast<compute_t<S>>(scale)});
  });
  return y;
}

}  // namespace

APEX_KERNELS(apex_parallel, m) {
  m.impl("scaled_softmax_forward", TORCH_BOX(&scaled_softmax_forward));
  m.impl("scaled_softmax_backward", TORCH_BOX(&scaled_softmax_backward));
  m.impl("causal_softmax_forward", TORCH_BOX(&causal_softmax_forward));
  m.impl("causal_softmax_backward", TORCH_BOX(&causal_softmax_backward));
  m.impl("masked_softmax_forward", TORCH_BOX(&masked_softmax_forward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
