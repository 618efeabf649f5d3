// Registers SwiGLU: checks, types and launch; the mathematics is in fused_bias_swiglu.h.
#include "fused_bias_swiglu.h"

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

using OptionalTensor = std::optional<Tensor>;

// Columns of the output, after the checks that make walking [rows, 2 * columns] safe.
int64_t columns_of(const char* op, const Tensor& input, const OptionalTensor& bias) {
  check_tensors(op, {{"input", input}});
  check(input.dim() > 0 && input.is_contiguous(), op, ": input must be contiguous rows, got ",
        describe(input), ".");
  int64_t width = input.size(-1);
  check(width > 0 && width % 2 == 0, op, ": input must have an even number of columns, got ",
        describe(input), ".");
  check_like(op, {"bias", bias}, width, input.scalar_type(), {"input", input});
  return width / 2;
}

// The output's sizes.
std::vector<int64_t> halved(const Tensor& input, int64_t columns) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  return sizes;
}

Tensor fused_bias_swiglu_forward(const Tensor& input, const OptionalTensor& bias) {
  const char* op = "fused_bias_swiglu_forward";
  int64_t columns = columns_of(op, input, bias), rows = input.numel() / (2 * columns);
  Tensor y = empty(input, halved(input, columns), input.scalar_type());
  Context context(input);
  dispatch_floating(op, input.scalar_type(), [&]<class S>() {
    rowwise(context, rows, columns,
            SwigluForward<S>{data<S>(input, "input"), data<S>(bias.value_or(input), "bias"),
                             ValueOr<compute_t<S>>(bias.has_value(), 0), data<S>(y, "y")});
  });
  return y;
}

std::tuple<Tensor, Tensor> fused_bias_swiglu_backward(const Tensor& dy_of_any_layout,
                                                      const Tensor& input,
                                                      const OptionalTensor& bias, bool bias_grad) {
  const char* op = "fused_bias_swiglu_backward";
  int64_t columns = columns_of(op, input, bias), rows = input.numel() / (2 * columns);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);  // often one number, expanded
  check_sizes(op, {"dy", dy}, halved(input, columns), input.scalar_type(), {"input", input});
  check(bias || !bias_grad, op, ": bias_grad needs a bias.");
  Tensor dinput = empty_like(input, input.scalar_type());
  Tensor dbias = empty(input, {bias_grad ? 2 * columns : 0}, input.scalar_type());
  Context context(input);
  dispatch_floating(op, input.scalar_type(), [&]<class S>() {
    rowwise_colwise(
        context, rows, columns, bias_grad,
        SwigluBackward<S>{data<S>(dy, "dy"), data<S>(input, "input"),
                          data<S>(bias.value_or(input), "bias"),
                          ValueOr<compute_t<S>>(bias.has_value(), 0), data<S>(dinput, "dinput"),
                          data<S>(dbias, "dbias"), columns, bias_grad});
  });
  return {dinput, dbias};
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("fused_bias_swiglu_forward", TORCH_BOX(&fused_bias_swiglu_forward));
  m.impl("fused_bias_swiglu_backward", TORCH_BOX(&fused_bias_swiglu_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
