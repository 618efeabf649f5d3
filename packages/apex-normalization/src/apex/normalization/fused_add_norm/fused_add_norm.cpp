// Registers the ops that add and layer-normalize: checks and launch; the mathematics is in
// add_layer_norm.h.
#include <tuple>

#include "add_layer_norm.h"
#include "registration.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(
    const Tensor& x, const Tensor& residual, const Tensor& weight, const OptionalTensor& bias,
    int64_t columns, double eps, bool zero_centered_gamma) {
  Operands o("add_layer_norm_forward", {"x", x}, {"residual", residual}, weight, columns);
  check_like(o.op, {"bias", bias}, columns, weight.scalar_type(), o.named_x);
  Tensor y = empty_like(x, x.scalar_type()), sum = empty_like(x, residual.scalar_type());
  Tensor mean = o.statistics(), rstd = o.statistics();
  Context context(x);
  o.dispatch([&]<class X, class S, class W>() {
    using T = compute_t<X>;
    rowwise(context, o.rows, columns,
            AddLayerNormForward<X, S, W>{
                {data<X>(x, "x"), data<S>(residual, "residual"), data<S>(sum, "sum")},
                o.affine<W, T>(bias, zero_centered_gamma),
                data<X>(y, "y"),
                data<T>(mean, "mean"),
                data<T>(rstd, "rstd"),
                static_cast<T>(eps)});
  });
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor& dy_of_any_layout, const OptionalTensor& dsum, const Tensor& sum,
    const Tensor& weight, const Tensor& mean, const Tensor& rstd, int64_t columns,
    bool weight_grads, bool zero_centered_gamma) {
  const char* op = "add_layer_norm_backward";
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);
  Operands o(op, {"dy", dy}, {"sum", sum}, weight, columns);
  o.check_statistics("mean", mean);
  o.check_statistics("rstd", rstd);
  GradTensors grads(o, dsum);
  Tensor dweight = empty(dy, {weight_grads ? columns : 0}, weight.scalar_type());
  Tensor dbias = empty(dy, {weight_grads ? columns : 0}, weight.scalar_type());
  Context context(dy);
  o.dispatch([&]<class X, class S, class W>() {
    using T = compute_t<X>;
    dispatch_bool(dsum.has_value(), [&]<bool kHasSumGrad>() {
      using Program = AddLayerNormBackward<X, S, W, kHasSumGrad>;
      rowwise_colwise(
          context, o.rows, o.columns, weight_grads,
          Program{data<X>(dy, "dy"), data<S>(sum, "sum"),
                  o.affine<W, T>(std::nullopt, zero_centered_gamma), data<T>(mean, "mean"),
                  data<T>(rstd, "rstd"), grads.template pointers<X, S, kHasSumGrad>(),
                  data<W>(dweight, "dweight"), data<W>(dbias, "dbias")});
    });
  });
  return {grads.dresidual, grads.dx, dweight, dbias};
}

}  // namespace

APEX_KERNELS(apex_normalization, m) {
  m.impl("add_layer_norm_forward", TORCH_BOX(&add_layer_norm_forward));
  m.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
