// Batch normalization with given statistics, an added input and ReLU, and its gradient.
//
//   xhat = (x - mean) * inv_std,  p = xhat * weight + bias (+ z),  y = p or max(p, 0)
//   dy' = dy, or 0 where p <= 0,  dz = dy'
//   dx = (dy' - sum_dy / n - (x - mean) * inv_std^2 * sum_dy_xmu / n) * weight * inv_std
//
// Ioffe & Szegedy 2015 (https://arxiv.org/abs/1502.03167), algorithms 1 and 2 and section 3, with
// sums over all n elements of a channel, which may lie on several ranks.
#pragma once

#include <limits>

#include "apex/math/batch_norm/layout.h"
#include "apex/math/batch_norm/statistics.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// p of the file's comment; with or without z.
template <class T, class... Z>
APEX_HD T preactivation(T mean, T inv_std, T weight, T bias, T x, Z... z) {
  return (((x - mean) * (inv_std * weight) + bias) + ... + z);
}

template <class X, bool kChannelLast>
struct BatchNormForward {
  using value_type = compute_t<X>;
  using storage_type = X;
  using matrix_type = X;
  using T = value_type;
  static constexpr int kRowsAtOnce = kChannelLast ? 2 : 1;

  Layout<kChannelLast> layout;
  Array<const T*, 4> parameters;  // mean, inv_std, weight, bias; each [channels]
  const X* x;                     // [rows, columns], see layout.h
  const X* z;                     // like x, or null
  X* y;                           // like x
  bool relu;

  template <class R>
  APEX_HD void row(R& row) const {
    T lowest = relu ? T(0) : -std::numeric_limits<T>::infinity();
    auto normalize = [=](T& y, auto... values) {
      T p = preactivation(values...);
      y = p < lowest ? lowest : p;  // NaN stays
    };
    if (z) {
      layout.each(row, parameters, normalize, row.out(y), row.in(x), row.in(z));
    } else {
      layout.each(row, parameters, normalize, row.out(y), row.in(x));
    }
  }
};

template <class X, bool kChannelLast>
struct ReluBackward {
  using value_type = compute_t<X>;
  using storage_type = X;
  using matrix_type = X;
  using T = value_type;
  static constexpr int kRowsAtOnce = kChannelLast ? 2 : 1;

  Layout<kChannelLast> layout;
  Array<const T*, 4> parameters;  // mean, inv_std, weight, bias; each [channels]
  const X* dy;                    // [rows, columns], see layout.h
  const X* x;                     // like dy
  const X* z;                     // like dy, or null
  X* masked;                      // like dy

  template <class R>
  APEX_HD void row(R& row) const {
    auto mask = [](T& masked, T mean, T inv_std, T weight, T bias, T dy, auto... inputs) {
      masked = zero_where(preactivation(mean, inv_std, weight, bias, inputs...) <= T(0), dy);
    };
    if (z) {
      layout.each(row, parameters, mask, row.out(masked), row.in(dy), row.in(x), row.in(z));
    } else {
      layout.each(row, parameters, mask, row.out(masked), row.in(dy), row.in(x));
    }
  }
};

template <class X, bool kChannelLast>
struct BatchNormBackward {
  using value_type = compute_t<X>;
  using storage_type = X;
  using matrix_type = X;
  using T = value_type;
  static constexpr int kRowsAtOnce = kChannelLast ? 2 : 1;

  Layout<kChannelLast> layout;
  Array<const T*, 5> parameters;  // mean, inv_std, weight, sum_dy, sum_dy_xmu; each [channels]
  const int64_t* count;           // one number: elements per channel that the sums are over
  const X* dy;                    // [rows, columns], see layout.h
  const X* x;                     // like dy
  X* dx;                          // like dy

  // With the sums of these vectors.
  APEX_HD BatchNormBackward with_sums(const ColumnVectors<T>& sums) const {
    BatchNormBackward own = *this;
    own.parameters[3] = sums[0];
    own.parameters[4] = sums[1];
    return own;
  }

  APEX_HD auto gradient() const {
    T share = T(1) / static_cast<T>(*count);
    return [=](T& dx, T mean, T inv_std, T weight, T sum_dy, T sum_dy_xmu, T dy, T x) {
      T slope = inv_std * inv_std * sum_dy_xmu * share;
      dx = (dy - sum_dy * share - (x - mean) * slope) * (weight * inv_std);
    };
  }

  template <class R>
  APEX_HD void row(R& row) const {
    layout.each(row, parameters, gradient(), row.out(dx), row.in(dy), row.in(x));
  }
};

// The same of rows that are channels, whose sums are still those of parts: a GPU's row adds them
// up, and the first of each channel stores the results.
template <class X>
struct BatchNormBackwardOfParts {
  using value_type = compute_t<X>;
  using storage_type = X;
  using T = value_type;

  BatchNormBackward<X, false> whole;
  const T* part_dy;      // [channels, parts]
  const T* part_dy_xmu;  // [channels, parts]
  int parts;
  GradStatistics<T> results;

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t channels = whole.layout.channels, channel = row.index() % channels;
    const int64_t at = channel * parts;
    const Array<double, 2> sums =
        row.sum_vectors(parts, Array<const T*, 2>{part_dy + at, part_dy_xmu + at});
    if (row.index() < channels) row.once([&] { results.store(channel, sums); });
    const T mean = whole.parameters[0][channel], inv_std = whole.parameters[1][channel];
    const T weight = whole.parameters[2][channel];
    const T sum_dy = static_cast<T>(sums[0]), sum_dy_xmu = static_cast<T>(sums[1]);
    row.each(
        [=, gradient = whole.gradient()](T& dx, T dy, T x) {
          gradient(dx, mean, inv_std, weight, sum_dy, sum_dy_xmu, dy, x);
        },
        row.out(whole.dx), row.in(whole.dy), row.in(whole.x));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
