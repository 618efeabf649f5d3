// Registers fast_layer_norm: checks, types and launch; the mathematics is in apex/math/norm/.
#include <optional>
#include <tuple>

#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/math/norm/layer_norm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Rows [..., columns] of x's dtype, and vectors [columns].
struct Rows {
  int64_t rows, columns;
};

Rows rows_of(const char* op, const NamedTensor& given, const Tensor& weight, const Tensor& bias) {
  check_tensor(op, given);
  const Tensor& x = *given.tensor;
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 0;
  check(columns > 0 && x.is_contiguous(), op, ": ", given.name,
        " must be contiguous [..., columns], with columns, got ", describe(x), ".");
  check_like(op, {"weight", weight}, columns, x.scalar_type(), given);
  check_like(op, {"bias", bias}, columns, x.scalar_type(), given);
  return {x.numel() / columns, columns};
}

template <class S>
Affine<S, compute_t<S>> affine_of(const Tensor& weight, const Tensor& bias,
                                  bool zero_centered_gamma) {
  using T = compute_t<S>;
  return {data<S>(weight, "weight"), data<S>(bias, "bias"), Scale<T>(true, zero_centered_gamma),
          ValueOr<T>(true, T(0))};
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& weight,
                                           const Tensor& bias, double eps,
                                           bool zero_centered_gamma) {
  const char* op = "fast_layer_norm_forward";
  const Rows o = rows_of(op, {"x", x}, weight, bias);
  check(eps >= 0, op, ": eps must not be negative, got ", eps, ".");
  Tensor y = empty_like(x, x.scalar_type());
  Tensor mean = empty(x, {o.rows}, statistics_dtype(x));
  Tensor rstd = empty(x, {o.rows}, statistics_dtype(x));
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    rowwise(context, o.rows, o.columns,
            LayerNormForward<S, S>{data<S>(x, "x"), affine_of<S>(weight, bias, zero_centered_gamma),
                                   data<S>(y, "y"), data<T>(mean, "mean"), data<T>(rstd, "rstd"),
                                   static_cast<T>(eps)});
  });
  return {y, mean, rstd};
}

// `saved` is x with its mean, or without one y, from which x is recovered.
template <bool kFromOutput>
std::tuple<Tensor, Tensor, Tensor> gradients(const char* op, const Tensor& dy_of_any_layout,
                                             const Tensor& saved, const Tensor& weight,
                                             const Tensor& bias, const OptionalTensor& mean,
                                             const Tensor& rstd, double eps, bool weight_grads,
                                             bool zero_centered_gamma) {
  const NamedTensor of_rows{kFromOutput ? "y" : "x", saved};
  const Rows o = rows_of(op, of_rows, weight, bias);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);
  check_sizes(op, {"dy", dy}, saved.sizes(), saved.scalar_type(), of_rows);
  check_like(op, {"rstd", rstd}, o.rows, statistics_dtype(saved), of_rows);
  check_like(op, {"mean", mean}, o.rows, statistics_dtype(saved), of_rows);
  Tensor dx = empty_like(saved, saved.scalar_type());
  const int64_t summed = weight_grads ? o.columns : 0;
  Tensor dweight = empty(saved, {summed}, saved.scalar_type());
  Tensor dbias = empty(saved, {summed}, saved.scalar_type());
  Context context(saved);
  dispatch_floating(op, saved.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    rowwise_colwise(
        context, o.rows, o.columns, weight_grads,
        LayerNormBackward<S, S, kFromOutput>{
            data<S>(dy, "dy"), data<S>(saved, "saved"),
            affine_of<S>(weight, bias, zero_centered_gamma),
            mean ? data<T>(*mean, "mean") : nullptr, data<T>(rstd, "rstd"), data<S>(dx, "dx"),
            data<S>(dweight, "dweight"), data<S>(dbias, "dbias"), smallest_divisor<T>(eps)});
  });
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                            const Tensor& mean, const Tensor& rstd,
                                            bool weight_grads, bool zero_centered_gamma) {
  return gradients<false>("fast_layer_norm_backward", dy, x, weight, weight, mean, rstd, 0,
                          weight_grads, zero_centered_gamma);
}

std::tuple<Tensor, Tensor, Tensor> backward_from_output(const Tensor& dy, const Tensor& y,
                                                        const Tensor& weight, const Tensor& bias,
                                                        const Tensor& rstd, double eps,
                                                        bool weight_grads,
                                                        bool zero_centered_gamma) {
  return gradients<true>("fast_layer_norm_backward_from_output", dy, y, weight, bias, {}, rstd, eps,
                         weight_grads, zero_centered_gamma);
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("fast_layer_norm_forward", TORCH_BOX(&forward));
  m.impl("fast_layer_norm_backward", TORCH_BOX(&backward));
  m.impl("fast_layer_norm_backward_from_output", TORCH_BOX(&backward_from_output));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
