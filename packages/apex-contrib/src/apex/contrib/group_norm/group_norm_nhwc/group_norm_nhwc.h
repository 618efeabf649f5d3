// Group normalization of samples [rows, channels], with SiLU or without, and its gradient.
//
// A group is channels side by side; mean and var are over all rows of its channels:
//
//   xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps)
//   p = xhat * scale + bias,  y = p or p * s,  s = 1 / (1 + exp(-p))
//   dp = dy or dy * s * (1 + p * (1 - s))
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dp * scale, means over the group
//   dweight = sum of dp * xhat, dbias = sum of dp, over rows and samples
//
// where scale is the weight, or 1 + weight if that is zero-centred.
//
// Wu & He 2018 (https://arxiv.org/abs/1803.08494).
#pragma once

#include <algorithm>
#include <cmath>

#include "apex/core/storage.h"
#include "apex/math/pivot.h"
#include "apex/math/sigmoid.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// A weight or bias [channels] in any dtype, counted from `origin`; without one it is `origin`.
template <class T>
struct Parameter {
  const void* data;  // or null
  Storage storage;
  T origin;

  APEX_HD T operator()(int64_t channel) const {
    if (data == nullptr) return origin;
    if constexpr (std::is_same_v<T, double>) {
      return static_cast<const double*>(data)[channel] + origin;
    } else {
      T value{};
      dispatch_storage(
          storage, [&]<class S>() { value = convert<T>(static_cast<const S*>(data)[channel]); });
      return value + origin;
    }
  }
};

struct Groups {
  int64_t count, channels, rows;  // groups and channels of a sample; rows of each
  int width;                      // channels of a group
  // Elements of one group.
  APEX_HD double size() const { return static_cast<double>(width) * static_cast<double>(rows); }
};

template <class X, bool kSilu>
struct GroupNormForward {
  using matrix_type = X;
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2;  // of x - pivot and of its square
  static constexpr int kVectors = 3, kBefore = 1;
  // Float32 rows gain nothing, nor do those of the backward, whose channels have five numbers.
  static constexpr int kRowsAtOnce = sizeof(X) == 2 ? 2 : 1;

  Groups groups;
  const X* x;  // [samples, rows, channels]
  Parameter<T> weight, bias;
  double eps;
  X* y;                        // like x
  T* mean;                     // [samples, groups]
  T* rstd;                     // [samples, groups]
  ColumnVectors<T> vectors{};  // pivot, scale and shift: p = (x - pivot) * scale + shift
  const X* first = nullptr;    // of this sample

  APEX_HD int64_t group_columns() const { return groups.width; }
  APEX_HD GroupNormForward of_sample(int64_t sample) const {
    GroupNormForward own = *this;
    own.mean += sample * groups.count;
    own.rstd += sample * groups.count;
    own.first = x + sample * groups.rows * groups.channels;
    return own;
  }

  APEX_HD Array<T, 1> before(int64_t channel) const {
    return {column_pivot<T>(first, groups.rows, groups.channels, channel)};
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(AddAround{}, row.in(x), row.shared(vectors[0]));
  }

  // Mean and 1 / standard deviation.
  template <class Team, class Matrix>
  APEX_HD Array<double, 2> statistics(const Team& team, int64_t group, const Matrix& matrix) const {
    const int64_t width = groups.width, begin = group * width, end = begin + width;
    const double rows = static_cast<double>(groups.rows), share = 1 / rows;
    const auto total = team.template sum<1>(begin, end, [&](int64_t c) {
      return Array<double, 1>{matrix.before(c)[0] + matrix.sums(c)[0] * share};
    });
    const double mu = total[0] / static_cast<double>(width);
    const auto squares = team.template sum<1>(begin, end, [&](int64_t c) {
      const Array<double, 2> s = matrix.sums(c);
      const double of_channel = s[0] * share, offset = matrix.before(c)[0] + of_channel - mu;
      return Array<double, 1>{s[1] - s[0] * of_channel + rows * offset * offset};
    });
    // Rounding may leave less than nothing of equal numbers.
    const double variance = squares[0] < 0 ? 0 : squares[0] / groups.size();
    return {mu, 1 / std::sqrt(variance + eps)};
  }

  template <class Team, class Matrix>
  APEX_HD void keep(const Team& team, int64_t group, const Array<double, 2>& statistics,
                    const Matrix&) const {
    team.once([&] {
      mean[group] = static_cast<T>(statistics[0]);
      rstd[group] = static_cast<T>(statistics[1]);
    });
  }

  APEX_HD Array<T, 2> after(int64_t channel, const Array<T, 1>& before,
                            const Array<double, 2>& statistics) const {
    const double factor = statistics[1] * weight(channel);
    return {static_cast<T>(factor),
            static_cast<T>(bias(channel) + (before[0] - statistics[0]) * factor)};
  }

  template <class R>
  APEX_HD void row(R& row) const {
    row.each(
        [](T& y, T x, T pivot, T scale, T shift) {
          T p = (x - pivot) * scale + shift;
          y = kSilu ? silu(p) : p;
        },
        row.out(y), row.in(x), row.shared(vectors[0]), row.shared(vectors[1]),
        row.shared(vectors[2]));
  }
};

// dp of the file's comment.
template <bool kSilu, class T>
APEX_HD T activation_gradient(T dy, T p) {
  if constexpr (kSilu) return dy * silu_slope(p, sigmoid(p));
  return dy;
}

template <class X, bool kSilu>
struct GroupNormBackward {
  using matrix_type = X;
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2;  // of dp and of dp * (x - mean)
  static constexpr int kVectors = 5, kBefore = 3;

  Groups groups;
  const X* dy;  // [samples, rows, channels]
  const X* x;   // like dy
  Parameter<T> weight, bias;
  const T* mean;  // [samples, groups]
  const T* rstd;  // [samples, groups]
  X* dx;          // like dy
  T* dweights;    // [samples, channels]: each sample's part of dweight, or null
  T* dbiases;     // [samples, channels], or null
  // mean, scale, bias, slope and shift: p = (x - mean) * scale + bias,
  // dx = dp * scale - (x - mean) * slope - shift
  ColumnVectors<T> vectors{};

  APEX_HD int64_t group_columns() const { return groups.width; }

  APEX_HD GroupNormBackward of_sample(int64_t sample) const {
    GroupNormBackward own = *this;
    own.mean += sample * groups.count;
    own.rstd += sample * groups.count;
    if (dweights != nullptr) {
      own.dweights += sample * groups.channels;
      own.dbiases += sample * groups.channels;
    }
    return own;
  }

  APEX_HD Array<T, 3> before(int64_t channel) const {
    const int group = static_cast<int>(channel) / groups.width;
    return {mean[group], rstd[group] * weight(channel), bias(channel)};
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T dy, T x, T mu, T scale, T bias) {
          T d = x - mu, dp = activation_gradient<kSilu>(dy, d * scale + bias);
          sums[0] += dp;
          sums[1] += dp * d;
        },
        row.in(dy), row.in(x), row.shared(vectors[0]), row.shared(vectors[1]),
        row.shared(vectors[2]));
  }

  // Slope and shift.
  template <class Team, class Matrix>
  APEX_HD Array<double, 2> statistics(const Team& team, int64_t group, const Matrix& matrix) const {
    const int64_t width = groups.width, begin = group * width;
    const double r = rstd[group], n = groups.size();
    const auto total = team.template sum<2>(begin, begin + width, [&](int64_t c) {
      const Array<double, 2> s = matrix.sums(c);
      const double w = weight(c);
      return Array<double, 2>{w * s[0], w * s[1] * r};
    });
    return {total[1] / n * r * r, total[0] / n * r};
  }

  template <class Team, class Matrix>
  APEX_HD void keep(const Team& team, int64_t group, const Array<double, 2>&,
                    const Matrix& matrix) const {
    if (dweights == nullptr) return;
    const int64_t width = groups.width, begin = group * width;
    const double r = rstd[group];
    team.each(begin, begin + width, [&](int64_t c) {
      const Array<double, 2> s = matrix.sums(c);
      dbiases[c] = static_cast<T>(s[0]);
      dweights[c] = static_cast<T>(s[1] * r);
    });
  }

  APEX_HD Array<T, 2> after(int64_t, const Array<T, 3>&, const Array<double, 2>& statistics) const {
    return {static_cast<T>(statistics[0]), static_cast<T>(statistics[1])};
  }

  template <class R>
  APEX_HD void row(R& row) const {
    row.each(
        [](T& dx, T dy, T x, T mu, T scale, T bias, T slope, T shift) {
          T d = x - mu, dp = activation_gradient<kSilu>(dy, d * scale + bias);
          dx = dp * scale - d * slope - shift;
        },
        row.out(dx), row.in(dy), row.in(x), row.shared(vectors[0]), row.shared(vectors[1]),
        row.shared(vectors[2]), row.shared(vectors[3]), row.shared(vectors[4]));
  }
};

// Adds up the samples' parts of the gradients.
template <class T, class W>
struct SumsOfSamples {
  using matrix_type = T;
  using value_type = T;
  static constexpr int kSums = 2;

  const T* dweights;  // [samples, channels]
  const T* dbiases;   // [samples, channels]
  W* dweight;         // [channels]
  W* dbias;           // [channels]

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T of_weight, T of_bias) {
          sums[0] += of_weight;
          sums[1] += of_bias;
        },
        row.in(dweights), row.in(dbiases));
  }
  APEX_HD void finish(int64_t channel, const Array<T, 2>& sums) const {
    dweight[channel] = convert<W>(sums[0]);
    dbias[channel] = convert<W>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
