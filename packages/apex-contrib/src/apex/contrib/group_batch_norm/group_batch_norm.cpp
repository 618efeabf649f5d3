// Registers batch normalization of contiguous rows [*, channels]: checks, types and launch; the
// mathematics is in group_batch_norm.h and apex/math/batch_norm/.
#include "group_batch_norm.h"

#include <algorithm>
#include <tuple>

#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/math/batch_norm/batch_norm.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// An op's input as the matrix [rows, channels].
struct Rows {
  const char* op;
  const Tensor& x;
  const char* name_of_x;
  int64_t channels, count;

  Rows(const char* op, const Tensor& x, const char* name = "x") : op(op), x(x), name_of_x(name) {
    check_tensors(op, {{name, x}});
    check(x.dim() > 0 && x.is_contiguous() && x.size(x.dim() - 1) > 0, op, ": ", name,
          " must be contiguous rows of at least one channel, got ", describe(x), ".");
    channels = x.size(x.dim() - 1);
    count = x.numel() / channels;
  }

  Tensor statistics(int64_t numel) const { return empty(x, {numel}, statistics_dtype(x)); }
  Tensor per_channel() const { return statistics(channels); }

  void check_operand(const char* name, const Tensor& tensor, int64_t numel,
                     ScalarType dtype) const {
    check_like(op, {name, tensor}, numel, dtype, {name_of_x, x});
  }
  void check_like_x(const char* name, const Tensor& tensor) const {
    check_sizes(op, {name, tensor}, x.sizes(), x.scalar_type(), {name_of_x, x});
  }
  template <class X>
  const X* like_x(const char* name, const Tensor& tensor) const {
    check_like_x(name, tensor);
    return data<X>(tensor, name);
  }
  void check_counts(const Tensor& count, int64_t numel) const {
    check_operand("count", count, numel, ScalarType::Long);
#if defined(APEX_CPU)  // a GPU would have to be waited for
    const int64_t* numbers = data<int64_t>(count, "count");
    for (int64_t i = 0; i < numel; ++i) {
      check(numbers[i] >= 0, op, ": count[", i, "] must not be negative, got ", numbers[i], ".");
    }
#endif
  }
  template <class T>
  const T* vector(const char* name, const Tensor& tensor) const {
    check_operand(name, tensor, channels, statistics_dtype(x));
    return data<T>(tensor, name);
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
  rowwise(context, rows.count - done, rows.channels, make(vectors, done * rows.channels));
}

std::tuple<Tensor, Tensor> batch_norm_moments(const Tensor& x_rows) {
  Rows rows("group_batch_norm_moments", x_rows);
  Tensor mean = rows.per_channel(), variance = rows.per_channel();
  Parts parts = parts_of_matrix(rows.count, rows.channels);
  Tensor part_shift = rows.statistics(parts.count() * rows.channels);
  Tensor part_variance = rows.statistics(parts.count() * rows.channels);
  Tensor pivot = rows.statistics(parts.group * rows.channels);
  Context context(x_rows);
  dispatch_floating(rows.op, x_rows.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X* x = data<X>(x_rows, "x");
    T *shifts = data<T>(part_shift, "shifts"), *variances = data<T>(part_variance, "variances");
    T* pivots = data<T>(pivot, "pivots");
    auto at = [&](int64_t row) { return x + row * rows.channels; };
    if (rows.count > 0) {
      rowwise(context, parts.group, rows.channels,
              BatchNormPivots<X>{
                  {{at(rows.count / 4), at(rows.count / 2), at(rows.count - 1 - rows.count / 4)}},
                  pivots});
    }
    parts.each([&](int64_t count, int64_t columns, int64_t element, int64_t part) {
      colwise(context, count, columns,
              BatchNormMoments<X>{x + element, pivots, shifts + part, variances + part,
                                  1.0 / static_cast<double>(count)});
    });
    colwise(context, parts.count(), rows.channels,
            BatchNormParts<T>{{shifts, variances, parts, data<T>(mean, "mean"),
                               data<T>(variance, "variance"), nullptr, 0.0},
                              pivots});
  });
  return {mean, variance};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_merge(const Tensor& mean, const Tensor& biased_var,
                                                    const Tensor& count, double eps) {
  Rows rows("group_batch_norm_merge", mean, "mean");
  check(mean.scalar_type() == statistics_dtype(mean), rows.op,
        ": mean must be float32 or float64, got ", describe(mean), ".");
  rows.check_like_x("biased_var", biased_var);
  rows.check_counts(count, rows.count);
  Tensor total = rows.per_channel(), variance = rows.per_channel(), inv_std = rows.per_channel();
  Context context(mean);
  CountsOf counts{data<int64_t>(count, "count")};
  auto merge = [&]<class T>(T* means) {
    colwise(context, rows.count, rows.channels,
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

std::tuple<Tensor, Tensor, Tensor> batch_norm_sums(const Tensor& dy, const Tensor& x_rows,
                                                   const OptionalTensor& y, const Tensor& mean) {
  Rows rows("group_batch_norm_sums", x_rows);
  Tensor sum_dy = rows.per_channel(), sum_dy_xmu = rows.per_channel();
  Tensor masked =
      y ? empty_like(x_rows, x_rows.scalar_type()) : empty(x_rows, {0}, x_rows.scalar_type());
  Parts parts = parts_of_matrix(rows.count, rows.channels);
  Tensor part_dy = rows.statistics(parts.count() * rows.channels);
  Tensor part_dy_xmu = rows.statistics(parts.count() * rows.channels);
  Tensor spread = rows.statistics(parts.group * rows.channels);
  Context context(x_rows);
  dispatch_floating(rows.op, x_rows.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    const X *gradient = rows.like_x<X>("dy", dy), *x = data<X>(x_rows, "x");
    const X* output = y ? rows.like_x<X>("y", *y) : nullptr;
    X* to = data<X>(masked, "masked");
    T *a = data<T>(part_dy, "part_dy"), *b = data<T>(part_dy_xmu, "part_dy_xmu");
    T* means = data<T>(spread, "mean");
    const T* mu = rows.vector<T>("mean", mean);
    rowwise(context, parts.group, rows.channels,
            BatchNormPivots<T>{{{mu, mu, mu}}, means});  // a copy in each row
    parts.each([&](int64_t count, int64_t columns, int64_t element, int64_t part) {
      if (output) {
        colwise(context, count, columns,
                BatchNormMaskedSums<X>{gradient + element, x + element, output + element, means,
                                       to + element, a + part, b + part});
      } else {
        colwise(context, count, columns,
                ColumnGradSums<X>{gradient + element, x + element, means, a + part, b + part});
      }
    });
    colwise(context, parts.count(), rows.channels,
            PartSums<T>{a, b, data<T>(sum_dy, "sum_dy"), data<T>(sum_dy_xmu, "sum_dy_xmu")});
  });
  return {masked, sum_dy, sum_dy_xmu};
}

Tensor batch_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                           const Tensor& inv_std, const Tensor& weight, const Tensor& sum_dy,
                           const Tensor& sum_dy_xmu, const Tensor& count) {
  Rows rows("group_batch_norm_backward", x);
  rows.check_counts(count, 1);
  Tensor dx = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(rows.op, x.scalar_type(), [&]<class X>() {
    using T = compute_t<X>;
    Array<const T*, 5> vectors{{rows.vector<T>("mean", mean), rows.vector<T>("inv_std", inv_std),
                                rows.vector<T>("weight", weight), rows.vector<T>("sum_dy", sum_dy),
                                rows.vector<T>("sum_dy_xmu", sum_dy_xmu)}};
    const int64_t* n = data<int64_t>(count, "count");
    const X *gradient = rows.like_x<X>("dy", dy), *from = data<X>(x, "x");
    X* to = data<X>(dx, "dx");
    side_by_side(context, rows, vectors, [&](const Array<const T*, 5>& given, int64_t first) {
      return BatchNormBackward<X, true>{{rows.channels},  given,        n,
                                        gradient + first, from + first, to + first};
    });
  });
  return dx;
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("group_batch_norm_moments", TORCH_BOX(&batch_norm_moments));
  m.impl("group_batch_norm_merge", TORCH_BOX(&batch_norm_merge));
  m.impl("group_batch_norm_forward", TORCH_BOX(&batch_norm_forward));
  m.impl("group_batch_norm_sums", TORCH_BOX(&batch_norm_sums));
  m.impl("group_batch_norm_backward", TORCH_BOX(&batch_norm_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
