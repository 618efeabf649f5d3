// Registers batch normalization of contiguous rows [*, channels]: checks, types and launch; the
// mathematics is in group_batch_norm.h and apex/math/batch_norm/.
#include "group_batch_norm.h"

#include <algorithm>
#include <tuple>

#include "apex/engine/colwise_each.h"
#include "apex/math/batch_norm/batch_norm.h"
#include "apex/math/batch_norm/parts.h"
#include "apex/math/batch_norm/statistics.h"
#include "apex/torch/batch_statistics.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// An op's input as the matrix [rows, channels].
struct Rows : Channels {
  int64_t count;

  Rows(const char* op, const Tensor& x, const char* name = "x") : Channels{op, x, name, 0} {
    check_tensors(op, {{name, x}});
    check(x.dim() > 0 && x.is_contiguous() && x.size(x.dim() - 1) > 0, op, ": ", name,
          " must be contiguous rows of at least one channel, got ", describe(x), ".");
    channels = x.size(x.dim() - 1);
    count = x.numel() / channels;
  }

  Tensor per_part(const Parts& parts) const {  // of a single part nothing is left to merge
    return statistics(parts.count() == 1 ? 0 : parts.count() * channels);
  }
  template <class X>
  const X* like_x(const char* name, const Tensor& tensor) const {
    check_like_input({name, tensor});
    return data<X>(tensor, name);
  }
};

// Runs make(vectors, first element) on all rows. On a CPU several rows side by side are one, with
// as many copies of the vectors: rows of few channels are short loops, and too short to be written
// around the cache.
template <class T, int N, class Make>
void side_by_side(const Context& context, const Rows& rows, const Array<const T*, N>& vectors,
                  const Make& make) {
  int64_t done = 0;
#if defined(APEX_CPU)
  // All vectors stay in the first-level cache. Rows are not 4 KiB of floats: two of them at once
  // would meet in the same lines of it.
  constexpr int64_t kColumns = 960;
  int64_t most = std::max<int64_t>(1, rows.count / 8);
  int64_t group = std::clamp<int64_t>(kColumns / rows.channels, 1, most);
  if (group > 1) {
    Tensor memory = rows.statistics(N * group * rows.channels);
    T* to = data<T>(memory, "vectors");
    Array<const T*, N> copies;
    for (int n = 0; n < N; ++n) {
      copies[n] = to;
      for (int64_t i = 0; i < group; ++i) to = std::copy_n(vectors[n], rows.channels, to);
    }
    rowwise(context, rows.count / group, group * rows.channels, make(copies, int64_t{0}));
    done = rows.count / group * group;
  }
#endif
  columns_each(context, rows.count - done, rows.channels, make(vectors, done * rows.channels));
}

// Stores the moments of all channels by results(type): a Statistics of the type's.
template <class Results>
void moments(const Rows& rows, const Results& results) {
  Parts parts = parts_of_matrix(rows.count, rows.channels);
  Tensor part_shift = rows.per_part(parts), part_variance = rows.per_part(parts);
  // A GPU's engine makes pivots itself.
  Tensor pivot = rows.statistics(kMatrixParts ? parts.group * rows.channels : 0);
  Context context(rows.x);
  dispatch_floating(rows.op, rows.x.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const Statistics<T> all = results(T());
    const X* x = data<X>(rows.x, rows.name_of_x);
    T *shifts = data<T>(part_shift, "shifts"), *variances = data<T>(part_variance, "variances");
    T* pivots = data<T>(pivot, "pivots");
    if constexpr (kMatrixParts) {
      if (rows.count > 0) {
        auto at = [&](int64_t row) { return x + row * rows.channels; };
        rowwise(context, parts.group, rows.channels,
                BatchNormPivots<X>{
                    {{at(rows.count / 4), at(rows.count / 2), at(rows.count - 1 - rows.count / 4)}},
                    pivots});
      }
    }
    const bool has_parts = parts.count() != 1;
    parts.each([&](int64_t count, int64_t columns, int64_t element, int64_t part) {
      const Statistics<T> own = has_parts ? Statistics<T>{shifts + part, variances + part} : all;
      colwise(context, count, columns,
              PivotMoments<X>{x + element, count, columns, own, has_parts, {pivots}});
    });
    if constexpr (kMatrixParts) {
      if (!has_parts) return;
      colwise(context, parts.count(), rows.channels,
              BatchNormParts<T>{{shifts, variances, parts, all}, pivots});
    }
  });
}

std::tuple<Tensor, Tensor> batch_norm_moments(const Tensor& x) {
  Rows rows("group_batch_norm_moments", x);
  return mean_and_variance<Statistics>(rows, [&](const auto& results) { moments(rows, results); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_statistics(const Tensor& x,
                                                                 const OptionalTensor& running_mean,
                                                                 const OptionalTensor& running_var,
                                                                 const OptionalTensor& num_batches,
                                                                 double eps, double momentum) {
  Rows rows("group_batch_norm_statistics", x);
  return all_statistics<Statistics>(rows, rows.count, running_mean, running_var, num_batches, eps,
                                    momentum, [&](const auto& results) { moments(rows, results); });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_merge(const Tensor& mean, const Tensor& biased_var,
                                                    const Tensor& count, double eps) {
  Rows rows("group_batch_norm_merge", mean, "mean");
  Context context(mean);
  return merged_statistics<Statistics>(
      rows, biased_var, count, eps,
      [&]<class T>(int64_t parts, const T* means, const T* variances, const int64_t* counts,
                   const Statistics<T>& results) {
        colwise(context, parts, rows.channels,
                PartMoments<T, CountsOf>{means, variances, {counts}, results});
      });
}

Tensor batch_norm_forward(const Tensor& x, const OptionalTensor& z, const Tensor& mean,
                          const Tensor& inv_std, const Tensor& weight, const Tensor& bias,
                          bool relu) {
  Rows rows("group_batch_norm_forward", x);
  Tensor y = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(rows.op, x.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    Array<const T*, 4> vectors{{rows.vector<T>("mean", mean), rows.vector<T>("inv_std", inv_std),
                                rows.vector<T>("weight", weight), rows.vector<T>("bias", bias)}};
    const X *from = data<X>(x, "x"), *added = z ? rows.like_x<X>("z", *z) : nullptr;
    X* to = data<X>(y, "y");
    side_by_side(context, rows, vectors, [&](const Array<const T*, 4>& given, int64_t first) {
      const X* others = added ? added + first : nullptr;
      return BatchNormForward<X, true>{{rows.channels}, given,      from + first,
                                       others,          to + first, relu};
    });
  });
  return y;
}

using Sums = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // masked, of it, of it * (x - mean),
                                                          // the weight's gradient

Sums sums_of(const Rows& rows, const Tensor& dy, const OptionalTensor& y, const Tensor& mean,
             const Tensor& inv_std) {
  const Tensor& x_rows = rows.x;
  Tensor sum_dy = rows.per_channel(), sum_dy_xmu = rows.per_channel();
  Tensor weight_grad = rows.per_channel();
  Tensor masked =
      y ? empty_like(x_rows, x_rows.scalar_type()) : empty(x_rows, {0}, x_rows.scalar_type());
  Parts parts = parts_of_matrix(rows.count, rows.channels);
  Tensor part_dy = rows.per_part(parts), part_dy_xmu = rows.per_part(parts);
  Tensor spread = rows.statistics(parts.group > 1 ? parts.group * rows.channels : 0);
  Context context(x_rows);
  dispatch_floating(rows.op, x_rows.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X *gradient = rows.like_x<X>("dy", dy), *x = data<X>(x_rows, "x");
    const X* output = y ? rows.like_x<X>("y", *y) : nullptr;
    X* to = data<X>(masked, "masked");
    T *a = data<T>(part_dy, "part_dy"), *b = data<T>(part_dy_xmu, "part_dy_xmu");
    const T *mu = rows.vector<T>("mean", mean), *means = mu;
    if (parts.group > 1) {
      T* copies = data<T>(spread, "mean");
      rowwise(context, parts.group, rows.channels,
              BatchNormPivots<T>{{{mu, mu, mu}}, copies});  // one in each row
      means = copies;
    }
    const GradStatistics<T> all{data<T>(sum_dy, "sum_dy"), data<T>(sum_dy_xmu, "sum_dy_xmu"),
                                rows.vector<T>("inv_std", inv_std),
                                data<T>(weight_grad, "weight_grad")};
    const bool has_parts = parts.count() != 1;
    parts.each([&](int64_t count, int64_t columns, int64_t element, int64_t part) {
      const GradStatistics<T> results = has_parts ? GradStatistics<T>{a + part, b + part} : all;
      if (output) {
        colwise(context, count, columns,
                BatchNormMaskedSums<X>{gradient + element, x + element, output + element, means,
                                       to + element, results});
      } else {
        colwise(context, count, columns,
                ColumnGradSums<X>{gradient + element, x + element, means, results});
      }
    });
    if constexpr (kMatrixParts) {
      if (has_parts) colwise(context, parts.count(), rows.channels, PartSums<T>{a, b, all});
    }
  });
  return {masked, sum_dy, sum_dy_xmu, weight_grad};
}

// What the gradient of x needs beside the sums.
struct Gradient {
  const Tensor &mean, &inv_std, &weight, &count;

  template <class T>
  Array<const T*, 5> vectors(const Rows& rows, const Tensor& sum_dy,
                             const Tensor& sum_dy_xmu) const {
    return {{rows.vector<T>("mean", mean), rows.vector<T>("inv_std", inv_std),
             rows.vector<T>("weight", weight), rows.vector<T>("sum_dy", sum_dy),
             rows.vector<T>("sum_dy_xmu", sum_dy_xmu)}};
  }
};

Tensor gradient_of_x(const Rows& rows, const Tensor& dy, const Gradient& given,
                     const Tensor& sum_dy, const Tensor& sum_dy_xmu) {
  rows.check_counts(given.count, 1);
  Tensor dx = empty_like(rows.x, rows.x.scalar_type());
  Context context(rows.x);
  dispatch_floating(rows.op, rows.x.scalar_type(), [&]<class X>() {
    const auto vectors = given.vectors<compute_t<X>>(rows, sum_dy, sum_dy_xmu);
    const int64_t* n = data<int64_t>(given.count, "count");
    const X *gradient = rows.like_x<X>("dy", dy), *from = data<X>(rows.x, "x");
    X* to = data<X>(dx, "dx");
    side_by_side(context, rows, vectors, [&](const auto& own, int64_t first) {
      return BatchNormBackward<X, true>{{rows.channels},  own,          n,
                                        gradient + first, from + first, to + first};
    });
  });
  return dx;
}

#if defined(APEX_GPU)
// The same with the sums, in two launches where that is quicker.
Sums gradients_of_rows(const Rows& rows, const Tensor& dy, const OptionalTensor& y,
                       const Gradient& given) {
  rows.check_counts(given.count, 1);
  const ScalarType dtype = rows.x.scalar_type();
  Tensor sum_dy = rows.per_channel(), sum_dy_xmu = rows.per_channel();
  Tensor weight_grad = rows.per_channel(), dx = empty_like(rows.x, dtype);
  Tensor masked = y ? empty_like(rows.x, dtype) : empty(rows.x, {0}, dtype);
  Context context(rows.x);
  dispatch_floating(rows.op, dtype, [&]<class X>() {
    using T = compute_t<X>;
    const X *gradient = rows.like_x<X>("dy", dy), *x = data<X>(rows.x, "x");
    const auto vectors = given.vectors<T>(rows, sum_dy, sum_dy_xmu);
    const GradStatistics<T> all{data<T>(sum_dy, "sum_dy"), data<T>(sum_dy_xmu, "sum_dy_xmu"),
                                vectors[1], data<T>(weight_grad, "weight_grad")};
    X* to = data<X>(masked, "masked");
    const BatchNormBackward<X, true> of_x{
        {rows.channels},   vectors, data<int64_t>(given.count, "count"),
        y ? to : gradient, x,       data<X>(dx, "dx")};
    if (y) {
      colwise_each(
          context, rows.count, rows.channels,
          BatchNormMaskedSums<X>{gradient, x, rows.like_x<X>("y", *y), vectors[0], to, all}, of_x);
    } else {
      colwise_each(context, rows.count, rows.channels,
                   ColumnGradSums<X>{gradient, x, vectors[0], all}, of_x);
    }
  });
  return {masked, dx, sum_dy, weight_grad};
}
#endif

Sums batch_norm_sums(const Tensor& dy, const Tensor& x, const OptionalTensor& y, const Tensor& mean,
                     const Tensor& inv_std) {
  return sums_of(Rows("group_batch_norm_sums", x), dy, y, mean, inv_std);
}

Tensor batch_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                           const Tensor& inv_std, const Tensor& weight, const Tensor& sum_dy,
                           const Tensor& sum_dy_xmu, const Tensor& count) {
  return gradient_of_x(Rows("group_batch_norm_backward", x), dy, {mean, inv_std, weight, count},
                       sum_dy, sum_dy_xmu);
}

// masked, dx, the sum of masked, and the weight's gradient.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_gradients(
    const Tensor& dy, const Tensor& x, const OptionalTensor& y, const Tensor& mean,
    const Tensor& inv_std, const Tensor& weight, const Tensor& count) {
  const Rows rows("group_batch_norm_gradients", x);
  const Gradient given{mean, inv_std, weight, count};
#if defined(APEX_GPU)
  return gradients_of_rows(rows, dy, y, given);
#else
  auto [masked, sum_dy, sum_dy_xmu, weight_grad] = sums_of(rows, dy, y, mean, inv_std);
  Tensor dx = gradient_of_x(rows, y ? masked : dy, given, sum_dy, sum_dy_xmu);
  return {masked, dx, sum_dy, weight_grad};
#endif
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("group_batch_norm_moments", TORCH_BOX(&batch_norm_moments));
  m.impl("group_batch_norm_statistics", TORCH_BOX(&batch_norm_statistics));
  m.impl("group_batch_norm_merge", TORCH_BOX(&batch_norm_merge));
  m.impl("group_batch_norm_forward", TORCH_BOX(&batch_norm_forward));
  m.impl("group_batch_norm_sums", TORCH_BOX(&batch_norm_sums));
  m.impl("group_batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  m.impl("group_batch_norm_gradients", TORCH_BOX(&batch_norm_gradients));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
