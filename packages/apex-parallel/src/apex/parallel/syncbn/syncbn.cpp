// Registers the ops of synchronised batch normalization: checks, types and launch; the mathematics
// is in apex/math/batch_norm/.
#include <tuple>

#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/math/batch_norm/batch_norm.h"
#include "apex/math/batch_norm/parts.h"
#include "apex/math/batch_norm/statistics.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// An op's input as a matrix, see layout.h.
struct Shape {
  const char* op;
  const Tensor& x;
  bool channel_last;
  int64_t channels, rows, columns;
  const char* name_of_x = "input";

  Tensor statistics(int64_t numel) const { return empty(x, {numel}, statistics_dtype(x)); }
  Tensor per_channel() const { return statistics(channels); }
  // See parts.h. Short rows are reduced as columns, of which each channel has several.
  bool has_short_rows() const { return !channel_last && rows > 0 && columns < kShortRow; }
  bool sums_columns() const { return channel_last || has_short_rows(); }
  Parts parts() const {
    int64_t batch = rows / channels;
    if (channel_last) return parts_of_matrix(rows, channels);
    if (has_short_rows()) return parts_of_matrix(batch, channels * columns);
    return parts_of_batch(batch, channels, columns);
  }
  Tensor per_part(const Parts& parts) const { return statistics(parts.count() * parts.columns); }
  // Where parts are merged to: `result` unless channels have several columns.
  Tensor per_column(const Parts& parts, const Tensor& result) const {
    return has_short_rows() ? statistics(parts.columns) : result;
  }

  void check_operand(const char* name, const Tensor& tensor, int64_t numel,
                     ScalarType dtype) const {
    check_like(op, {name, tensor}, numel, dtype, {name_of_x, x});
  }
  void check_like_input(const NamedTensor& given) const {
    check_sizes(op, given, x.sizes(), x.scalar_type(), {name_of_x, x});
  }
  // A per-channel vector's memory.
  template <class T>
  const T* vector(const char* name, const Tensor& tensor) const {
    check_operand(name, tensor, channels, statistics_dtype(x));
    return data<T>(tensor, name);
  }
};

Shape shape_of(const char* op, const Tensor& x, bool channel_last, const char* name = "input") {
  check_tensors(op, {{name, x}});
  check(x.is_contiguous(), op, ": ", name, " must be contiguous, got ", describe(x), ".");
  check(x.dim() >= 2 || (x.dim() == 1 && channel_last), op, ": ", name,
        " must have a batch and a channel dimension, got ", describe(x), ".");
  int64_t channels = channel_last ? x.size(x.dim() - 1) : x.size(1);
  check(channels > 0, op, ": ", name, " must have at least one channel, got ", describe(x), ".");
  if (channel_last) return {op, x, true, channels, x.numel() / channels, channels, name};
  int64_t rows = x.numel() == 0 ? 0 : x.size(0) * channels;
  return {op, x, false, channels, rows, rows == 0 ? 0 : x.numel() / rows, name};
}

#if defined(APEX_CPU)
void check_counts(const char* op, const Tensor& counts) {
  const int64_t* numbers = data<int64_t>(counts, "count");
  for (int64_t i = 0; i < counts.numel(); ++i) {
    check(numbers[i] >= 0, op, ": count[", i, "] must not be negative, got ", numbers[i], ".");
  }
}
#else
void check_counts(const char*, const Tensor&) {}  // would wait for the GPU
#endif

template <class X>
const X* optional_data(const OptionalTensor& tensor, const char* name) {
  return tensor ? data<X>(*tensor, name) : nullptr;
}

// Runs Program<X, channel_last> row by row; `make` builds it.
template <template <class, bool> class Program, class Make>
void run_rows(const Shape& shape, Make&& make) {
  Context context(shape.x);
  dispatch_floating(shape.op, shape.x.scalar_type(), [&]<class X>() {
    dispatch_bool(shape.channel_last, [&]<bool kChannelLast>() {
      Program<X, kChannelLast> program{};
      program.layout.channels = shape.channels;
      make(program);
      rowwise(context, shape.rows, shape.columns, program);
    });
  });
}

std::tuple<Tensor, Tensor> welford_mean_var(const Tensor& input, bool channel_last) {
  Shape shape = shape_of("welford_mean_var", input, channel_last);
  Tensor mean = shape.per_channel(), variance = shape.per_channel();
  Parts parts = shape.parts();
  Tensor part_mean = shape.per_part(parts), part_variance = shape.per_part(parts);
  Tensor column_mean = shape.per_column(parts, mean);
  Tensor column_variance = shape.per_column(parts, variance);
  Context context(input);
  dispatch_floating(shape.op, input.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X* x = data<X>(input, "input");
    T *means = data<T>(part_mean, "means"), *variances = data<T>(part_variance, "variances");
    T *all_means = data<T>(column_mean, "mean"), *all_vars = data<T>(column_variance, "variance");
    if (shape.sums_columns()) {
      parts.each([&](int64_t rows, int64_t columns, int64_t element, int64_t part) {
        colwise(context, rows, columns,
                ColumnMoments<X>{x + element, means + part, variances + part});
      });
    } else {
      rowwise(context, shape.rows, shape.columns, RowMoments<X>{x, means, variances});
    }
    colwise(context, parts.count(), parts.columns,
            PartMoments<T, Parts>{means, variances, parts, all_means, all_vars, nullptr, 0.0});
    if (shape.has_short_rows()) {
      rowwise(context, shape.channels, shape.columns,
              EqualMoments<T>{all_means, all_vars, data<T>(mean, "mean"),
                              data<T>(variance, "variance")});
    }
  });
  return {mean, variance};
}

std::tuple<Tensor, Tensor, Tensor> welford_parallel(const Tensor& mean, const Tensor& biased_var,
                                                    const Tensor& count, double eps) {
  Shape shape = shape_of("welford_parallel", mean, true, "mean");
  check(mean.scalar_type() == statistics_dtype(shape.x), shape.op,
        ": mean must be float32 or float64, got ", describe(mean), ".");
  shape.check_like_input({"biased_var", biased_var});
  shape.check_operand("count", count, shape.rows, ScalarType::Long);
  check_counts(shape.op, count);
  Tensor total = shape.per_channel(), variance = shape.per_channel(), inv_std = shape.per_channel();
  Context context(mean);
  CountsOf counts{data<int64_t>(count, "count")};
  auto merge = [&]<class T>(T* means) {
    colwise(context, shape.rows, shape.channels,
            PartMoments<T, CountsOf>{means, data<T>(biased_var, "biased_var"), counts,
                                     data<T>(total, "mean"), data<T>(variance, "variance"),
                                     data<T>(inv_std, "inv_std"), eps});
  };
  if (mean.scalar_type() == ScalarType::Double) {
    merge(data<double>(mean, "mean"));
  } else {
    merge(data<float>(mean, "mean"));
  }
  return {total, variance, inv_std};
}

Tensor batchnorm_forward(const Tensor& input, const OptionalTensor& z, const Tensor& mean,
                         const Tensor& inv_std, const Tensor& weight, const Tensor& bias,
                         bool channel_last, bool fuse_relu) {
  Shape shape = shape_of("batchnorm_forward", input, channel_last);
  shape.check_like_input({"z", z});
  Tensor out = empty_like(input, input.scalar_type());
  run_rows<BatchNormForward>(shape, [&]<class X, bool kLast>(BatchNormForward<X, kLast>& p) {
    using T = compute_t<X>;
    p.parameters = {{shape.vector<T>("mean", mean), shape.vector<T>("inv_std", inv_std),
                     shape.vector<T>("weight", weight), shape.vector<T>("bias", bias)}};
    p.x = data<X>(input, "input");
    p.z = optional_data<X>(z, "z");
    p.y = data<X>(out, "out");
    p.relu = fuse_relu;
  });
  return out;
}

Tensor relu_bw(const Tensor& grad_output, const Tensor& input, const OptionalTensor& z,
               const Tensor& mean, const Tensor& inv_std, const Tensor& weight, const Tensor& bias,
               bool channel_last) {
  Shape shape = shape_of("relu_bw", input, channel_last);
  shape.check_like_input({"grad_output", grad_output});
  shape.check_like_input({"z", z});
  Tensor masked = empty_like(input, input.scalar_type());
  run_rows<ReluBackward>(shape, [&]<class X, bool kLast>(ReluBackward<X, kLast>& p) {
    using T = compute_t<X>;
    p.parameters = {{shape.vector<T>("mean", mean), shape.vector<T>("inv_std", inv_std),
                     shape.vector<T>("weight", weight), shape.vector<T>("bias", bias)}};
    p.dy = data<X>(grad_output, "grad_output");
    p.x = data<X>(input, "input");
    p.z = optional_data<X>(z, "z");
    p.masked = data<X>(masked, "masked");
  });
  return masked;
}

std::tuple<Tensor, Tensor> reduce_bn(const Tensor& grad_output, const Tensor& input,
                                     const Tensor& mean, bool channel_last) {
  Shape shape = shape_of("reduce_bn", input, channel_last);
  shape.check_like_input({"grad_output", grad_output});
  Tensor sum_dy = shape.per_channel(), sum_dy_xmu = shape.per_channel();
  Parts parts = shape.parts();
  Tensor part_dy = shape.per_part(parts), part_dy_xmu = shape.per_part(parts);
  Tensor column_dy = shape.per_column(parts, sum_dy);
  Tensor column_dy_xmu = shape.per_column(parts, sum_dy_xmu);
  Tensor spread = shape.statistics(shape.sums_columns() ? parts.group * parts.columns : 0);
  Context context(input);
  dispatch_floating(shape.op, input.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X *dy = data<X>(grad_output, "grad_output"), *x = data<X>(input, "input");
    const T* mu = shape.vector<T>("mean", mean);
    T *a = data<T>(part_dy, "part_dy"), *b = data<T>(part_dy_xmu, "part_dy_xmu");
    T *all_dy = data<T>(column_dy, "sum_dy"), *all_dy_xmu = data<T>(column_dy_xmu, "sum_dy_xmu");
    if (shape.sums_columns()) {
      T* means = data<T>(spread, "mean");
      rowwise(context, parts.group * shape.channels, parts.columns / shape.channels,
              Spread<T>{mu, means, shape.channels});
      parts.each([&](int64_t rows, int64_t columns, int64_t element, int64_t part) {
        colwise(context, rows, columns,
                ColumnGradSums<X>{dy + element, x + element, means, a + part, b + part});
      });
    } else {
      rowwise(context, shape.rows, shape.columns, RowGradSums<X>{dy, x, mu, a, b, shape.channels});
    }
    colwise(context, parts.count(), parts.columns, PartSums<T>{a, b, all_dy, all_dy_xmu});
    if (shape.has_short_rows()) {
      rowwise(context, shape.channels, shape.columns,
              EqualSums<T>{all_dy, all_dy_xmu, data<T>(sum_dy, "sum_dy"),
                           data<T>(sum_dy_xmu, "sum_dy_xmu")});
    }
  });
  return {sum_dy, sum_dy_xmu};
}

Tensor batchnorm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                          const Tensor& inv_std, const Tensor& weight, const Tensor& sum_dy,
                          const Tensor& sum_dy_xmu, const Tensor& count, bool channel_last) {
  Shape shape = shape_of("batchnorm_backward", input, channel_last);
  shape.check_like_input({"grad_output", grad_output});
  shape.check_operand("count", count, 1, ScalarType::Long);
  check_counts(shape.op, count);
  Tensor dx = empty_like(input, input.scalar_type());
  run_rows<BatchNormBackward>(shape, [&]<class X, bool kLast>(BatchNormBackward<X, kLast>& p) {
    using T = compute_t<X>;
    p.parameters = {{shape.vector<T>("mean", mean), shape.vector<T>("inv_std", inv_std),
                     shape.vector<T>("weight", weight), shape.vector<T>("sum_dy", sum_dy),
                     shape.vector<T>("sum_dy_xmu", sum_dy_xmu)}};
    p.count = data<int64_t>(count, "count");
    p.dy = data<X>(grad_output, "grad_output");
    p.x = data<X>(input, "input");
    p.dx = data<X>(dx, "dx");
  });
  return dx;
}

}  // namespace

APEX_KERNELS(apex_parallel, m) {
  m.impl("welford_mean_var", TORCH_BOX(&welford_mean_var));
  m.impl("welford_parallel", TORCH_BOX(&welford_parallel));
  m.impl("batchnorm_forward", TORCH_BOX(&batchnorm_forward));
  m.impl("relu_bw", TORCH_BOX(&relu_bw));
  m.impl("reduce_bn", TORCH_BOX(&reduce_bn));
  m.impl("batchnorm_backward", TORCH_BOX(&batchnorm_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
