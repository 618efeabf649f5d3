// Registers the ops of synchronised batch normalization: checks, types and launch; the mathematics
// is in apex/math/batch_norm/.
#include <algorithm>
#include <tuple>

#include "apex/engine/colwise_each.h"
#include "apex/math/batch_norm/batch_norm.h"
#include "apex/math/batch_norm/parts.h"
#include "apex/math/batch_norm/pivots.h"
#include "apex/math/batch_norm/statistics.h"
#include "apex/torch/batch_statistics.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// An op's input as a matrix, see layout.h.
struct Shape : Channels {
  bool channel_last;
  int64_t rows, columns;

  int64_t elements() const { return channel_last ? rows : rows / channels * columns; }
  // See parts.h. Short rows are reduced as columns, of which each channel has several.
  bool has_short_rows() const {
    return kMatrixParts && !channel_last && rows > 0 && columns < kShortRow;
  }
  bool sums_columns() const { return channel_last || has_short_rows(); }
  Parts parts() const {
    int64_t batch = rows / channels;
    if (channel_last) return parts_of_matrix(rows, channels);
    if (has_short_rows()) return parts_of_matrix(batch, channels * columns);
    return parts_of_batch(batch, channels, columns);
  }
  // Whether columns of a single part are the channels: nothing is left to merge.
  bool is_one_part(const Parts& parts) const { return channel_last && parts.count() == 1; }
  Tensor per_part(const Parts& parts) const {
    return statistics(is_one_part(parts) ? 0 : parts.count() * parts.columns);
  }
  Tensor per_column(const Parts& parts) const {
    return statistics(has_short_rows() ? parts.columns : 0);
  }
};

Shape shape_of(const char* op, const Tensor& x, bool channel_last, const char* name = "input") {
  check_tensors(op, {{name, x}});
  check(x.is_contiguous(), op, ": ", name, " must be contiguous, got ", describe(x), ".");
  check(x.dim() >= 2 || (x.dim() == 1 && channel_last), op, ": ", name,
        " must have a batch and a channel dimension, got ", describe(x), ".");
  int64_t channels = channel_last ? x.size(x.dim() - 1) : x.size(1);
  check(channels > 0, op, ": ", name, " must have at least one channel, got ", describe(x), ".");
  const Channels of{op, x, name, channels};
  if (channel_last) return {of, true, x.numel() / channels, channels};
  int64_t rows = x.numel() == 0 ? 0 : x.size(0) * channels;
  return {of, false, rows, rows == 0 ? 0 : x.numel() / rows};
}

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
      if constexpr (kChannelLast) {
        columns_each(context, shape.rows, shape.columns, program);
      } else {
        rowwise(context, shape.rows, shape.columns, program);
      }
    });
  });
}

// Stores the moments of all channels by results(type): a Statistics of the type's.
template <class Results>
void moments(const Shape& shape, const Results& results) {
  Parts parts = shape.parts();
  Tensor part_mean = shape.per_part(parts), part_variance = shape.per_part(parts);
  Tensor column_mean = shape.per_column(parts), column_variance = shape.per_column(parts);
  Context context(shape.x);
  dispatch_floating(shape.op, shape.x.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X* x = data<X>(shape.x, shape.name_of_x);
    const Statistics<T> all = results(T());
    if (shape.is_one_part(parts)) {
      const auto whole = moments_of_matrix(x, shape.rows, shape.columns, all);
      colwise(context, shape.rows, shape.columns, whole);
      return;
    }
    T *means = data<T>(part_mean, "means"), *variances = data<T>(part_variance, "variances");
    if (!shape.sums_columns()) {
      rowwise(context, shape.rows, shape.columns, RowMoments<X>{x, means, variances});
    } else if constexpr (kMatrixParts) {
      parts.each([&](int64_t rows, int64_t columns, int64_t element, int64_t part) {
        colwise(context, rows, columns,
                ColumnMoments<X>{x + element, {means + part, variances + part}});
      });
    }
    const bool short_rows = shape.has_short_rows();
    T *mean = data<T>(column_mean, "mean"), *variance = data<T>(column_variance, "variance");
    colwise(context, parts.count(), parts.columns,
            PartMoments<T, Parts>{means, variances, parts,
                                  short_rows ? Statistics<T>{mean, variance} : all});
    if constexpr (kMatrixParts) {
      if (!short_rows) return;
      rowwise(context, shape.channels, shape.columns,
              EqualMoments<T>{mean, variance, static_cast<double>(shape.elements()), all});
    }
  });
}

std::tuple<Tensor, Tensor> welford_mean_var(const Tensor& input, bool channel_last) {
  Shape shape = shape_of("welford_mean_var", input, channel_last);
  return mean_and_variance<Statistics>(shape,
                                       [&](const auto& results) { moments(shape, results); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_statistics(
    const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches, double eps, double momentum, bool channel_last) {
  Shape shape = shape_of("batch_statistics", input, channel_last);
  return all_statistics<Statistics>(shape, shape.elements(), running_mean, running_var, num_batches,
                                    eps, momentum,
                                    [&](const auto& results) { moments(shape, results); });
}

std::tuple<Tensor, Tensor, Tensor> welford_parallel(const Tensor& mean, const Tensor& biased_var,
                                                    const Tensor& count, double eps) {
  Shape shape = shape_of("welford_parallel", mean, true, "mean");
  Context context(mean);
  return merged_statistics<Statistics>(
      shape, biased_var, count, eps,
      [&]<class T>(int64_t parts, const T* means, const T* variances, const int64_t* counts,
                   const Statistics<T>& results) {
        colwise(context, parts, shape.channels,
                PartMoments<T, CountsOf>{means, variances, {counts}, results});
      });
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

using Sums =
    std::tuple<Tensor, Tensor, Tensor>;  // of dy, of dy * (x - mean), the weight's gradient

Sums sums_of(const Shape& shape, const Tensor& grad_output, const Tensor& mean,
             const Tensor& inv_std) {
  const Tensor& input = shape.x;
  shape.check_like_input({"grad_output", grad_output});
  Tensor sum_dy = shape.per_channel(), sum_dy_xmu = shape.per_channel();
  Tensor weight_grad = shape.per_channel();
  Parts parts = shape.parts();
  Tensor part_dy = shape.per_part(parts), part_dy_xmu = shape.per_part(parts);
  Tensor column_dy = shape.per_column(parts), column_dy_xmu = shape.per_column(parts);
  Context context(input);
  dispatch_floating(shape.op, input.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X *dy = data<X>(grad_output, "grad_output"), *x = data<X>(input, "input");
    const T* mu = shape.vector<T>("mean", mean);
    const GradStatistics<T> all{data<T>(sum_dy, "sum_dy"), data<T>(sum_dy_xmu, "sum_dy_xmu"),
                                shape.vector<T>("inv_std", inv_std),
                                data<T>(weight_grad, "weight_grad")};
    if (shape.is_one_part(parts)) {
      colwise(context, shape.rows, shape.columns, ColumnGradSums<X>{dy, x, mu, all});
      return;
    }
    T *a = data<T>(part_dy, "part_dy"), *b = data<T>(part_dy_xmu, "part_dy_xmu");
    if (!shape.sums_columns()) {
      rowwise(context, shape.rows, shape.columns, RowGradSums<X>{dy, x, mu, a, b, shape.channels});
    } else if constexpr (kMatrixParts) {
      Tensor spread = shape.statistics(parts.group * parts.columns);
      T* means = data<T>(spread, "mean");
      rowwise(context, parts.group * shape.channels, parts.columns / shape.channels,
              Spread<T>{mu, means, shape.channels});
      parts.each([&](int64_t rows, int64_t columns, int64_t element, int64_t part) {
        colwise(context, rows, columns,
                ColumnGradSums<X>{dy + element, x + element, means, {a + part, b + part}});
      });
    }
    const bool short_rows = shape.has_short_rows();
    T *of_columns = data<T>(column_dy, "dy"), *of_columns_xmu = data<T>(column_dy_xmu, "dy_xmu");
    colwise(context, parts.count(), parts.columns,
            PartSums<T>{a, b, short_rows ? GradStatistics<T>{of_columns, of_columns_xmu} : all});
    if constexpr (kMatrixParts) {
      if (!short_rows) return;
      rowwise(context, shape.channels, shape.columns,
              EqualSums<T>{of_columns, of_columns_xmu, all});
    }
  });
  return {sum_dy, sum_dy_xmu, weight_grad};
}

// What the input's gradient needs beside the sums.
struct Gradient {
  const Tensor &dy, &mean, &inv_std, &weight, &count;

  void check(const Shape& shape) const {
    shape.check_like_input({"grad_output", dy});
    shape.check_counts(count, 1);
  }
  template <class X, bool kLast>
  void set(BatchNormBackward<X, kLast>& p, const Shape& shape, const Tensor& sum_dy,
           const Tensor& sum_dy_xmu, const Tensor& dx) const {
    using T = compute_t<X>;
    p.layout.channels = shape.channels;
    p.parameters = {{shape.vector<T>("mean", mean), shape.vector<T>("inv_std", inv_std),
                     shape.vector<T>("weight", weight), shape.vector<T>("sum_dy", sum_dy),
                     shape.vector<T>("sum_dy_xmu", sum_dy_xmu)}};
    p.count = data<int64_t>(count, "count");
    p.dy = data<X>(dy, "grad_output");
    p.x = data<X>(shape.x, shape.name_of_x);
    p.dx = data<X>(dx, "dx");
  }
};

Tensor input_gradient(const Shape& shape, const Gradient& given, const Tensor& sum_dy,
                      const Tensor& sum_dy_xmu) {
  given.check(shape);
  Tensor dx = empty_like(shape.x, shape.x.scalar_type());
  run_rows<BatchNormBackward>(shape, [&](auto& p) { given.set(p, shape, sum_dy, sum_dy_xmu, dx); });
  return dx;
}

#if defined(APEX_GPU)
// The sums and the input's gradient in two launches, where that is quicker.
std::tuple<Tensor, Tensor, Tensor> gradients_of_rows(const Shape& shape, const Gradient& given) {
  given.check(shape);
  const int64_t rows = shape.channel_last ? 0 : shape.rows, batch = rows / shape.channels;
  Tensor dx = empty_like(shape.x, shape.x.scalar_type()), parts = shape.statistics(2 * rows);
  Tensor sum_dy = shape.per_channel(), sum_dy_xmu = shape.per_channel();
  Tensor weight_grad = shape.per_channel();
  Context context(shape.x);
  dispatch_floating(shape.op, shape.x.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const GradStatistics<T> all{data<T>(sum_dy, "sum_dy"), data<T>(sum_dy_xmu, "sum_dy_xmu"),
                                shape.vector<T>("inv_std", given.inv_std),
                                data<T>(weight_grad, "weight_grad")};
    if (shape.channel_last) {
      BatchNormBackward<X, true> p;
      given.set(p, shape, sum_dy, sum_dy_xmu, dx);
      return colwise_each(context, shape.rows, shape.columns,
                          ColumnGradSums<X>{p.dy, p.x, p.parameters[0], all}, p);
    }
    BatchNormBackward<X, false> p;
    given.set(p, shape, sum_dy, sum_dy_xmu, dx);
    T *a = data<T>(parts, "parts"), *b = a + rows;
    rowwise(context, rows, shape.columns,
            RowGradSums<X>{p.dy, p.x, p.parameters[0], a, b, shape.channels, batch});
    rowwise(context, rows, shape.columns,
            BatchNormBackwardOfParts<X>{p, a, b, static_cast<int>(batch), all});
  });
  return {dx, sum_dy, weight_grad};
}
#endif

Sums reduce_bn(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
               const Tensor& inv_std, bool channel_last) {
  return sums_of(shape_of("reduce_bn", input, channel_last), grad_output, mean, inv_std);
}

Tensor batchnorm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                          const Tensor& inv_std, const Tensor& weight, const Tensor& sum_dy,
                          const Tensor& sum_dy_xmu, const Tensor& count, bool channel_last) {
  return input_gradient(shape_of("batchnorm_backward", input, channel_last),
                        {grad_output, mean, inv_std, weight, count}, sum_dy, sum_dy_xmu);
}

std::tuple<Tensor, Tensor, Tensor> batchnorm_gradients(const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& mean,
                                                       const Tensor& inv_std, const Tensor& weight,
                                                       const Tensor& count, bool channel_last) {
  const Shape shape = shape_of("batchnorm_gradients", input, channel_last);
  const Gradient given{grad_output, mean, inv_std, weight, count};
#if defined(APEX_GPU)
  const int64_t parts = shape.rows / shape.channels;  // of a channel, where channels are second
  const bool has_few = parts > 0 && parts <= std::max(kRowParts, shape.columns / 4);
  if (channel_last || has_few) return gradients_of_rows(shape, given);
#endif
  auto [sum_dy, sum_dy_xmu, weight_grad] = sums_of(shape, grad_output, mean, inv_std);
  return {input_gradient(shape, given, sum_dy, sum_dy_xmu), sum_dy, weight_grad};
}

}  // namespace

APEX_KERNELS(apex_parallel, m) {
  m.impl("welford_mean_var", TORCH_BOX(&welford_mean_var));
  m.impl("batch_statistics", TORCH_BOX(&batch_statistics));
  m.impl("welford_parallel", TORCH_BOX(&welford_parallel));
  m.impl("batchnorm_forward", TORCH_BOX(&batchnorm_forward));
  m.impl("relu_bw", TORCH_BOX(&relu_bw));
  m.impl("reduce_bn", TORCH_BOX(&reduce_bn));
  m.impl("batchnorm_backward", TORCH_BOX(&batchnorm_backward));
  m.impl("batchnorm_gradients", TORCH_BOX(&batchnorm_gradients));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
