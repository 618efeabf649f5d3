// Registers the layer and RMS normalization ops: checks, types and launch; the mathematics is in
// apex/math/norm/.
#include <tuple>

#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/math/norm/layer_norm.h"
#include "apex/math/norm/rms_norm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Number of rows of `x` seen as [rows, columns], after the checks that make walking it safe.
int64_t rows_of(const char* op, const char* name, const Tensor& x, int64_t columns) {
  check(columns > 0, op, ": columns must be positive, got ", columns, ".");
  check(x.numel() % columns == 0, op, ": ", name, " has ", x.numel(),
        " elements, which is no multiple of columns = ", columns, ".");
  check(x.is_contiguous(), op, ": ", name, " must be contiguous, got ", describe(x), ".");
  return x.numel() / columns;
}

// `readable` has at least `columns` elements of W, or there are no rows.
template <class W, class T>
Affine<W, T> affine_of(const OptionalTensor& weight, const OptionalTensor& bias,
                       bool zero_centered_gamma, const Tensor& readable) {
  auto pointer = [](const Tensor& tensor, const char* name) {
    return static_cast<const W*>(memory_of(tensor, name));
  };
  return {pointer(weight.value_or(readable), "weight"), pointer(bias.value_or(readable), "bias"),
          Scale<T>(weight.has_value(), zero_centered_gamma), ValueOr<T>(bias.has_value(), T(0))};
}

// Calls body<X, W>() for equal dtypes and for a 16-bit input with a float32 weight; Python casts
// other pairs to one of these.
template <class Body>
void dispatch_pair(const char* op, ScalarType x, ScalarType weight, Body&& body) {
  dispatch_floating(op, x, [&]<class X>() {
    if (weight == scalar_type_of<X>()) return body.template operator()<X, X>();
    if constexpr (sizeof(X) == 2) {
      if (weight == ScalarType::Float) return body.template operator()<X, float>();
    }
    fail(op, ": no kernel for input in ", dtype_name(x), " with weight in ", dtype_name(weight),
         ".");
  });
}

// What forward and backward of both normalizations check alike.
struct Operands {
  const char* op;
  NamedTensor named_x;
  const Tensor& x;  // or the saved tensor
  int64_t rows, columns;
  ScalarType x_dtype, weight_dtype;

  void check_affine(const OptionalTensor& weight, const OptionalTensor& bias) const {
    check(weight || !bias, op, ": a bias needs a weight.");
    check_like(op, {"weight", weight}, columns, weight_dtype, named_x);
    check_like(op, {"bias", bias}, columns, weight_dtype, named_x);
  }
  void check_statistics(const char* name, const Tensor& tensor) const {
    check_like(op, {name, tensor}, rows, statistics_dtype(x), named_x);
  }
  Tensor statistics() const { return empty(x, {rows}, statistics_dtype(x)); }
};

Operands forward_operands(const char* op, const Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& bias, int64_t columns) {
  check_tensors(op, {{"x", x}, {"weight", weight}, {"bias", bias}});
  ScalarType dtype = x.scalar_type();
  Operands operands{op,
                    {"x", x},
                    x,
                    rows_of(op, "x", x, columns),
                    columns,
                    dtype,
                    weight ? weight->scalar_type() : dtype};
  operands.check_affine(weight, bias);
  return operands;
}

// `named` is x, or y from which x is recovered.
Operands backward_operands(const char* op, const Tensor& dy, const NamedTensor& named,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const Tensor& rstd, int64_t columns, bool weight_grads) {
  const Tensor& saved = *named.tensor;
  Operands operands{op,
                    named,
                    saved,
                    rows_of(op, named.name, saved, columns),
                    columns,
                    saved.scalar_type(),
                    dy.scalar_type()};
  check_sizes(op, {"dy", dy}, saved.sizes(), operands.weight_dtype, named);
  check(weight || !weight_grads, op, ": weight_grads needs a weight.");
  operands.check_affine(weight, bias);
  operands.check_statistics("rstd", rstd);
  return operands;
}

// Calls body<X, W>(); from the output there are kernels for equal dtypes alone.
template <bool kFromOutput, class Body>
void dispatch_backward(const Operands& o, Body&& body) {
  if constexpr (!kFromOutput) return dispatch_pair(o.op, o.x_dtype, o.weight_dtype, body);
  check(o.x_dtype == o.weight_dtype, o.op, ": y and dy must have one dtype, got ",
        dtype_name(o.x_dtype), " and ", dtype_name(o.weight_dtype), ".");
  dispatch_floating(o.op, o.x_dtype, [&]<class X>() { body.template operator()<X, X>(); });
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const OptionalTensor& weight,
                                                      const OptionalTensor& bias, int64_t columns,
                                                      double eps, bool zero_centered_gamma) {
  const char* op = "layer_norm_forward";
  Operands o = forward_operands(op, x, weight, bias, columns);
  Tensor y = empty_like(x, o.weight_dtype);
  Tensor mean = o.statistics(), rstd = o.statistics();
  Context context(x);
  dispatch_pair(op, o.x_dtype, o.weight_dtype, [&]<class X, class W>() {
    using T = compute_t<X>;
    rowwise(
        context, o.rows, columns,
        LayerNormForward<X, W>{
            data<X>(x, "x"), affine_of<W, T>(weight, bias, zero_centered_gamma, weight.value_or(x)),
            data<W>(y, "y"), data<T>(mean, "mean"), data<T>(rstd, "rstd"), static_cast<T>(eps)});
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const OptionalTensor& weight,
                                            int64_t columns, double eps, bool zero_centered_gamma) {
  const char* op = "rms_norm_forward";
  Operands o = forward_operands(op, x, weight, std::nullopt, columns);
  Tensor y = empty_like(x, o.weight_dtype);
  Tensor rstd = o.statistics();
  Context context(x);
  dispatch_pair(op, o.x_dtype, o.weight_dtype, [&]<class X, class W>() {
    using T = compute_t<X>;
    rowwise(
        context, o.rows, columns,
        RmsNormForward<X, W>{data<X>(x, "x"), affine_of<W, T>(weight, {}, zero_centered_gamma, x),
                             data<W>(y, "y"), data<T>(rstd, "rstd"), static_cast<T>(eps)});
  });
  return {y, rstd};
}

template <bool kFromOutput>
std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(
    const char* op, const Tensor& dy_of_any_layout, const Tensor& saved,
    const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
    const Tensor& rstd, int64_t columns, double eps, bool weight_grads, bool zero_centered_gamma) {
  const NamedTensor named{kFromOutput ? "y" : "x", saved};
  check_tensors(op, {{"dy", dy_of_any_layout}, named});
  Tensor dy = as_contiguous(dy_of_any_layout);
  Operands o = backward_operands(op, dy, named, weight, bias, rstd, columns, weight_grads);
  if (mean) o.check_statistics("mean", *mean);
  Tensor dx = empty_like(saved, o.x_dtype);
  int64_t summed = weight_grads ? columns : 0;
  Tensor dweight = empty(saved, {summed}, o.weight_dtype);
  Tensor dbias = empty(saved, {summed}, o.weight_dtype);
  Context context(saved);
  dispatch_backward<kFromOutput>(o, [&]<class X, class W>() {
    using Program = LayerNormBackward<X, W, kFromOutput>;
    using T = compute_t<X>;
    rowwise_colwise(
        context, o.rows, o.columns, weight_grads,
        Program{data<W>(dy, "dy"), data<typename Program::Saved>(saved, "saved"),
                affine_of<W, T>(weight, bias, zero_centered_gamma, dy),
                mean ? data<T>(*mean, "mean") : nullptr, data<T>(rstd, "rstd"), data<X>(dx, "dx"),
                data<W>(dweight, "dweight"), data<W>(dbias, "dbias"), smallest_divisor<T>(eps)});
  });
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const Tensor& x,
                                                       const OptionalTensor& weight,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       int64_t columns, bool weight_grads,
                                                       bool zero_centered_gamma) {
  return layer_norm_gradients<false>("layer_norm_backward", dy, x, weight, {}, mean, rstd, columns,
                                     0, weight_grads, zero_centered_gamma);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_from_output(
    const Tensor& dy, const Tensor& y, const OptionalTensor& weight, const OptionalTensor& bias,
    const Tensor& rstd, int64_t columns, double eps, bool weight_grads, bool zero_centered_gamma) {
  return layer_norm_gradients<true>("layer_norm_backward_from_output", dy, y, weight, bias, {},
                                    rstd, columns, eps, weight_grads, zero_centered_gamma);
}

template <bool kFromOutput>
std::tuple<Tensor, Tensor> rms_norm_gradients(const char* op, const Tensor& dy_of_any_layout,
                                              const Tensor& saved, const OptionalTensor& weight,
                                              const Tensor& rstd, int64_t columns, double eps,
                                              bool weight_grads, bool zero_centered_gamma) {
  const NamedTensor named{kFromOutput ? "y" : "x", saved};
  check_tensors(op, {{"dy", dy_of_any_layout}, named});
  Tensor dy = as_contiguous(dy_of_any_layout);
  Operands o = backward_operands(op, dy, named, weight, std::nullopt, rstd, columns, weight_grads);
  Tensor dx = empty_like(saved, o.x_dtype);
  Tensor dweight = empty(saved, {weight_grads ? columns : 0}, o.weight_dtype);
  Context context(saved);
  dispatch_backward<kFromOutput>(o, [&]<class X, class W>() {
    using Program = RmsNormBackward<X, W, kFromOutput>;
    using T = compute_t<X>;
    rowwise_colwise(
        context, o.rows, o.columns, weight_grads,
        Program{data<W>(dy, "dy"), data<typename Program::Saved>(saved, "saved"),
                affine_of<W, T>(weight, {}, zero_centered_gamma, dy), data<T>(rstd, "rstd"),
                data<X>(dx, "dx"), data<W>(dweight, "dweight"), smallest_divisor<T>(eps)});
  });
  return {dx, dweight};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x,
                                             const OptionalTensor& weight, const Tensor& rstd,
                                             int64_t columns, bool weight_grads,
                                             bool zero_centered_gamma) {
  return rms_norm_gradients<false>("rms_norm_backward", dy, x, weight, rstd, columns, 0,
                                   weight_grads, zero_centered_gamma);
}

std::tuple<Tensor, Tensor> rms_norm_backward_from_output(const Tensor& dy, const Tensor& y,
                                                         const OptionalTensor& weight,
                                                         const Tensor& rstd, int64_t columns,
                                                         double eps, bool weight_grads,
                                                         bool zero_centered_gamma) {
  return rms_norm_gradients<true>("rms_norm_backward_from_output", dy, y, weight, rstd, columns,
                                  eps, weight_grads, zero_centered_gamma);
}

}  // namespace

APEX_KERNELS(apex_normalization, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("layer_norm_backward_from_output", TORCH_BOX(&layer_norm_backward_from_output));
  m.impl("rms_norm_forward", TORCH_BOX(&rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("rms_norm_backward_from_output", TORCH_BOX(&rms_norm_backward_from_output));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
