// Registers the fused add-and-normalize ops: checks, types and launch; the mathematics is in
// add_layer_norm.h and add_rms_norm.h.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "add_layer_norm.h"
#include "add_rms_norm.h"
#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// A fresh contiguous tensor on the device of `like`. torch::stable::new_empty() finds its operator
// by name at every call, which takes longer than normalizing a few rows.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), static_cast<int32_t>(dtype),
                                                  device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor empty_like(const Tensor& like, ScalarType dtype) {
  auto sizes = like.sizes();
  return empty(like, {sizes.begin(), sizes.end()}, dtype);
}

void check_like(const char* op, const char* name, const Tensor& tensor, int64_t numel,
                ScalarType dtype, const Tensor& x) {
  check(tensor.numel() == numel && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
            tensor.is_cpu() == x.is_cpu() && tensor.get_device_index() == x.get_device_index(),
        op, ": ", name, " must be contiguous, with ", numel, " elements of ", dtype_name(dtype),
        " on the device of x; got ", describe(tensor), ", x is ", describe(x), ".");
}

ScalarType statistics_dtype(ScalarType x) {
  return x == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls body<X, S, W>(): one type for all; for 16-bit x also float32 weights, and float32 weights
// with a float32 sum. Python casts other combinations to one of these.
template <class Body>
void dispatch_types(const char* op, ScalarType x, ScalarType sum, ScalarType weight, Body&& body) {
  dispatch_floating(op, x, [&]<class X>() {
    if (sum == x && weight == x) return body.template operator()<X, X, X>();
    if constexpr (sizeof(X) == 2) {
      bool float_weight = weight == ScalarType::Float;
      if (float_weight && sum == x) return body.template operator()<X, X, float>();
      if (float_weight && sum == weight) return body.template operator()<X, float, float>();
    }
    fail(op, ": no kernel for x in ", dtype_name(x), " with a sum in ", dtype_name(sum),
         " and weight in ", dtype_name(weight), ".");
  });
}

// What forward and backward of both normalizations check alike. `x` is dy in the backward, `sum`
// the residual in the forward.
struct Operands {
  const char* op;
  const Tensor &x, &sum, &weight;
  int64_t columns;
  int64_t rows = 0;

  Operands(const char* op, const Tensor& x, const Tensor& sum, const Tensor& weight,
           int64_t columns)
      : op(op), x(x), sum(sum), weight(weight), columns(columns) {
    check(columns > 0, op, ": columns must be positive, got ", columns, ".");
    check(x.numel() % columns == 0, op, ": x has ", x.numel(),
          " elements, which is no multiple of columns = ", columns, ".");
    rows = x.numel() / columns;
    check_like(op, "x", x, x.numel(), x.scalar_type(), x);
    check_like(op, "residual or sum", sum, x.numel(), sum.scalar_type(), x);
    check_like(op, "weight", weight, columns, weight.scalar_type(), x);
  }
  void check_statistics(const char* name, const Tensor& tensor) const {
    check_like(op, name, tensor, rows, statistics_dtype(x.scalar_type()), x);
  }
  Tensor statistics() const { return empty(x, {rows}, statistics_dtype(x.scalar_type())); }

  template <class Body>
  void dispatch(Body&& body) const {
    dispatch_types(op, x.scalar_type(), sum.scalar_type(), weight.scalar_type(), body);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(const Tensor& x,
                                                                  const Tensor& residual,
                                                                  const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  int64_t columns, double eps) {
  Operands o("add_layer_norm_forward", x, residual, weight, columns);
  if (bias) check_like(o.op, "bias", *bias, columns, weight.scalar_type(), x);
  Tensor y = empty_like(x, x.scalar_type()), sum = empty_like(x, residual.scalar_type());
  Tensor mean = o.statistics(), rstd = o.statistics();
  Context context(x);
  o.dispatch([&]<class X, class S, class W>() {
    using T = compute_t<X>;
    dispatch_bool(bias.has_value(), [&]<bool kHasBias>() {
      rowwise(context, o.rows, columns,
              AddLayerNormForward<X, S, W, kHasBias>{
                  data<X>(x, "x"), data<S>(residual, "residual"), data<W>(weight, "weight"),
                  kHasBias ? data<W>(*bias, "bias") : nullptr, data<X>(y, "y"), data<S>(sum, "sum"),
                  data<T>(mean, "mean"), data<T>(rstd, "rstd"), static_cast<T>(eps)});
    });
  });
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_forward(const Tensor& x, const Tensor& residual,
                                                        const Tensor& weight, int64_t columns,
                                                        double eps) {
  Operands o("add_rms_norm_forward", x, residual, weight, columns);
  Tensor y = empty_like(x, x.scalar_type()), sum = empty_like(x, residual.scalar_type());
  Tensor rstd = o.statistics();
  Context context(x);
  o.dispatch([&]<class X, class S, class W>() {
    using T = compute_t<X>;
    rowwise(context, o.rows, columns,
            AddRmsNormForward<X, S, W>{
                data<X>(x, "x"), data<S>(residual, "residual"), data<W>(weight, "weight"),
                data<X>(y, "y"), data<S>(sum, "sum"), data<T>(rstd, "rstd"), static_cast<T>(eps)});
  });
  return {y, sum, rstd};
}

// Memory for the gradients of x and residual: one tensor where they have one dtype.
struct GradTensors {
  const OptionalTensor& dsum;
  Tensor dresidual, dx;

  GradTensors(const Operands& o, const OptionalTensor& dsum)
      : dsum(dsum),
        dresidual(empty_like(o.x, o.sum.scalar_type())),
        dx(empty(o.x, {o.x.scalar_type() == o.sum.scalar_type() ? 0 : o.x.numel()},
                 o.x.scalar_type())) {
    if (dsum) check_like(o.op, "dsum", *dsum, o.x.numel(), o.sum.scalar_type(), o.x);
  }
  template <class X, class S, bool kHasSumGrad>
  InputGrads<X, S, kHasSumGrad> pointers() const {
    return {kHasSumGrad ? data<S>(*dsum, "dsum") : nullptr, data<S>(dresidual, "dresidual"),
            data<X>(dx, "dx")};
  }
};

// The inputs' gradients alone, or with the sums over rows in one pass.
template <class Program>
void run_backward(const Context& context, const Operands& o, bool weight_grads,
                  const Program& program) {
  if (weight_grads) {
    rowwise_colwise(context, o.rows, o.columns, program);
  } else {
    rowwise(context, o.rows, o.columns, program);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor& dy, const OptionalTensor& dsum, const Tensor& sum, const Tensor& weight,
    const Tensor& mean, const Tensor& rstd, int64_t columns, bool weight_grads) {
  Operands o("add_layer_norm_backward", dy, sum, weight, columns);
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
      run_backward(context, o, weight_grads,
                   Program{data<X>(dy, "dy"), data<S>(sum, "sum"), data<W>(weight, "weight"),
                           data<T>(mean, "mean"), data<T>(rstd, "rstd"),
                           grads.template pointers<X, S, kHasSumGrad>(),
                           data<W>(dweight, "dweight"), data<W>(dbias, "dbias")});
    });
  });
  return {grads.dresidual, grads.dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(const Tensor& dy,
                                                         const OptionalTensor& dsum,
                                                         const Tensor& sum, const Tensor& weight,
                                                         const Tensor& rstd, int64_t columns,
                                                         bool weight_grads) {
  Operands o("add_rms_norm_backward", dy, sum, weight, columns);
  o.check_statistics("rstd", rstd);
  GradTensors grads(o, dsum);
  Tensor dweight = empty(dy, {weight_grads ? columns : 0}, weight.scalar_type());
  Context context(dy);
  o.dispatch([&]<class X, class S, class W>() {
    using T = compute_t<X>;
    dispatch_bool(dsum.has_value(), [&]<bool kHasSumGrad>() {
      using Program = AddRmsNormBackward<X, S, W, kHasSumGrad>;
      run_backward(context, o, weight_grads,
                   Program{data<X>(dy, "dy"), data<S>(sum, "sum"), data<W>(weight, "weight"),
                           data<T>(rstd, "rstd"), grads.template pointers<X, S, kHasSumGrad>(),
                           data<W>(dweight, "dweight")});
    });
  });
  return {grads.dresidual, grads.dx, dweight};
}

}  // namespace

APEX_KERNELS(apex_normalization, m) {
  m.impl("add_layer_norm_forward", TORCH_BOX(&add_layer_norm_forward));
  m.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  m.impl("add_rms_norm_forward", TORCH_BOX(&add_rms_norm_forward));
  m.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
