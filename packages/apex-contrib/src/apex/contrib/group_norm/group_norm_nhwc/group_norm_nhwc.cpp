// Registers group_norm_nhwc: checks, types and launch; the mathematics is in group_norm_nhwc.h.
#include "group_norm_nhwc.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "apex/engine/colwise_rowwise.h"
#include "apex/torch/channels_last.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// A tensor [N, channels, *], whose elements per channel are rows of a sample.
struct Samples {
  int64_t count;
  Groups groups;
};

Samples samples_of(const char* op, const Tensor& x, int64_t groups) {
  check_tensors(op, {{"x", x}});
  const int64_t dims = x.dim(), channels = dims > 1 ? x.size(1) : 0;
  check(channels > 0 && channels <= std::numeric_limits<int>::max(), op,
        ": x must be [N, channels, *], with channels, below 2^31, got ", describe(x), ".");
  check(groups > 0 && channels % groups == 0, op, ": groups must divide the ", channels,
        " channels of x, got ", groups, ".");
  int64_t rows = x.size(0) == 0 ? 0 : 1;  // a size beside 0 may be any
  for (int64_t d = 2; d < dims; ++d) rows = product({rows, x.size(d)});
  return {x.size(0), {groups, channels, rows, static_cast<int>(channels / groups)}};
}

// `otherwise` stands in the place of a tensor.
template <class T>
Parameter<T> parameter_of(const char* op, const char* name, const OptionalTensor& tensor,
                          const Tensor& x, const Groups& groups, double otherwise,
                          bool zero_centered = false) {
  if (!tensor) return {nullptr, Storage::kOther, static_cast<T>(otherwise)};
  const ScalarType dtype = tensor->scalar_type();
  check_like(op, {name, tensor}, groups.channels, dtype, {"x", x});
  const bool is_double = std::is_same_v<T, double>;
  check(is_double ? dtype == ScalarType::Double
                  : dtype == ScalarType::Float || dtype == ScalarType::Half ||
                        dtype == ScalarType::BFloat16,
        op, ": ", name, " must be ", is_double ? "float64" : "float32, float16 or bfloat16",
        ", as x is ", dtype_name(x.scalar_type()), "; got ", dtype_name(dtype), ".");
  return {operand(*tensor, name), storage_of(dtype),
          zero_centered ? T(1) : T(-0.0)};  // -0 changes no number
}

// What the gradients of weight and bias are stored as.
ScalarType parameters_dtype(const char* op, const OptionalTensor& weight,
                            const OptionalTensor& bias, const Tensor& x) {
  check(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op,
        ": weight and bias must have one dtype.");
  return weight ? weight->scalar_type() : bias ? bias->scalar_type() : x.scalar_type();
}

// Calls body<S, whether SiLU follows>().
template <class Body>
void dispatch_silu(const char* op, const Tensor& x, bool silu, Body&& body) {
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    dispatch_bool(silu, [&]<bool kSilu>() { body.template operator()<S, kSilu>(); });
  });
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x_of_any_layout,
                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                           int64_t groups, double eps, bool silu,
                                           bool zero_centered_gamma) {
  const char* op = "group_norm_nhwc_forward";
  const Samples o = samples_of(op, x_of_any_layout, groups);
  check(eps >= 0, op, ": eps must not be negative, got ", eps, ".");
  Tensor x = as_channels_last(x_of_any_layout), y = empty_channels_last(x);
  const ScalarType dtype = statistics_dtype(x);
  Tensor mean = empty(x, {o.count * groups}, dtype), rstd = empty(x, {o.count * groups}, dtype);
  if (o.groups.rows == 0) {  // nothing to normalize: no statistics
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(mean.get()));
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(rstd.get()));
  }
  Context context(x);
  dispatch_silu(op, x, silu, [&]<class S, bool kSilu>() {
    using T = compute_t<S>;
    colwise_rowwise(context, o.count, o.groups.rows, o.groups.channels,
                    GroupNormForward<S, kSilu>{
                        o.groups, data<S>(x, "x"),
                        parameter_of<T>(op, "weight", weight, x, o.groups, 1, zero_centered_gamma),
                        parameter_of<T>(op, "bias", bias, x, o.groups, 0), eps, data<S>(y, "y"),
                        data<T>(mean, "mean"), data<T>(rstd, "rstd")});
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dy_of_any_layout, const Tensor& x_of_any_layout, const OptionalTensor& weight,
    const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd, int64_t groups,
    double /*eps*/, bool silu, bool weight_grads, bool zero_centered_gamma) {
  const char* op = "group_norm_nhwc_backward";
  const Samples o = samples_of(op, x_of_any_layout, groups);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  check(std::ranges::equal(dy_of_any_layout.sizes(), x_of_any_layout.sizes()) &&
            dy_of_any_layout.scalar_type() == x_of_any_layout.scalar_type() &&
            dy_of_any_layout.is_cpu() == x_of_any_layout.is_cpu() &&
            dy_of_any_layout.get_device_index() == x_of_any_layout.get_device_index(),
        op, ": dy must have shape, dtype and device of x, ", describe(x_of_any_layout), "; got ",
        describe(dy_of_any_layout), ".");
  Tensor dy = as_channels_last(dy_of_any_layout), x = as_channels_last(x_of_any_layout);
  const ScalarType dtype = statistics_dtype(x);
  check_like(op, {"mean", mean}, o.count * groups, dtype, {"x", x});
  check_like(op, {"rstd", rstd}, o.count * groups, dtype, {"x", x});
  const int64_t channels = o.groups.channels, summed = weight_grads ? channels : 0;
  Tensor dx = empty_channels_last(x);
  const ScalarType stored = parameters_dtype(op, weight, bias, x);
  Tensor dweight = empty(x, {summed}, stored), dbias = empty(x, {summed}, stored);
  Tensor parts = empty(x, {2, o.count, summed}, dtype);
  Context context(x);
  dispatch_silu(op, x, silu, [&]<class S, bool kSilu>() {
    using T = compute_t<S>;
    T* dweights = weight_grads ? data<T>(parts, "parts") : nullptr;
    T* dbiases = weight_grads ? dweights + o.count * channels : nullptr;
    colwise_rowwise(context, o.count, o.groups.rows, channels,
                    GroupNormBackward<S, kSilu>{
                        o.groups, data<S>(dy, "dy"), data<S>(x, "x"),
                        parameter_of<T>(op, "weight", weight, x, o.groups, 1, zero_centered_gamma),
                        parameter_of<T>(op, "bias", bias, x, o.groups, 0), data<T>(mean, "mean"),
                        data<T>(rstd, "rstd"), data<S>(dx, "dx"), dweights, dbiases});
  });
  if (!weight_grads) return {dx, dweight, dbias};
  dispatch_floating(op, stored, [&]<class W>() {
    using T = compute_t<W>;
    const T* dweights = data<T>(parts, "parts");
    const int64_t samples = o.groups.rows > 0 ? o.count : 0;  // else no sample has written its part
    colwise(context, samples, channels,
            SumsOfSamples<T, W>{dweights, dweights + o.count * channels,
                                data<W>(dweight, "dweight"), data<W>(dbias, "dbias")});
  });
  return {dx, dweight, dbias};
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("group_norm_nhwc_forward", TORCH_BOX(&forward));
  m.impl("group_norm_nhwc_backward", TORCH_BOX(&backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
