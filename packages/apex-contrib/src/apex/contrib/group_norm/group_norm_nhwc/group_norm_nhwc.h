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
#include "apex/math/median.h"
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

  APEX_HD int64_t width() const { return channels / count; }
  // Elements of one group.
  APEX_HD double size() const { return static_cast<double>(width()) * static_cast<double>(rows); }
};

template <class X, bool kSilu>
struct GroupNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2;  // of x - pivot and of its square
  // Float32 rows gain nothing, nor do those of the backward, whose channels have five numbers.
  static constexpr int kRowsAtOnce = sizeof(X) == 2 ? 2 : 1;

  Groups groups;
  const X* x;  // [samples, rows, channels]
  Parameter<T> weight, bias;
  double eps;
  X* y;        // like x
  T* mean;     // [samples, groups]
  T* rstd;     // [samples, groups]
  T* vectors;  // [samples, 3, channels]: pivot, scale and shift, p = (x - pivot) * scale + shift

  APEX_HD GroupNormForward of_sample(int64_t sample) const {
    GroupNormForward own = *this;
    own.mean += sample * groups.count;
    own.rstd += sample * groups.count;
    own.vectors += sample * 3 * groups.channels;
    return own;
  }

  // A pivot near each channel's mean: E[x^2] - E[x]^2 loses every digit once the mean is 10^4
  // standard deviations. The median of three rows, of which one may lie in a border of zeros.
  template <class G>
  APEX_HD void before(G& group) const {
    const int64_t channels = groups.channels;
    const X* first = x + group.index() * groups.rows * channels;
    group.each(0, channels, [=, rows = groups.rows, pivots = vectors](int64_t channel) {
      auto at = [&](int64_t row) { return convert<T>(first[row * channels + channel]); };
      pivots[channel] = median(at(rows / 4), at(rows / 2), at(rows - 1 - rows / 4));
    });
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    const T* pivots = vectors;
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T x, T pivot) {
          T d = x - pivot;
          sums[0] += d;
          sums[1] += d * d;
        },
        row.in(x), row.shared(pivots));
  }

  template <class G, class Sums>
  APEX_HD void between(G& group, const Sums& sums) const {
    group.each(0, groups.count, [&, at = *this](int64_t index) {
      const int64_t width = at.groups.width(), begin = index * width, end = begin + width;
      const double rows = static_cast<double>(at.groups.rows), n = at.groups.size();
      const double share = 1 / rows;
      T *pivot = at.vectors, *scale = pivot + at.groups.channels,
        *shift = scale + at.groups.channels;
      double total = 0, squares = 0;
      for (int64_t c = begin; c < end; ++c) total += pivot[c] + sums(c)[0] * share;
      const double mu = total / static_cast<double>(width);
      for (int64_t c = begin; c < end; ++c) {
        const Array<double, 2> s = sums(c);
        const double of_channel = s[0] * share, offset = pivot[c] + of_channel - mu;
        squares += s[1] - s[0] * of_channel + rows * offset * offset;
      }
      // Rounding may leave less than nothing of equal numbers.
      const double variance = squares < 0 ? 0 : squares / n;
      const double r = 1 / std::sqrt(variance + at.eps);
      at.mean[index] = static_cast<T>(mu);
      at.rstd[index] = static_cast<T>(r);
      for (int64_t c = begin; c < end; ++c) {
        const double factor = r * at.weight(c);
        scale[c] = static_cast<T>(factor);
        shift[c] = static_cast<T>(at.bias(c) + (pivot[c] - mu) * factor);
      }
    });
  }

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t channels = row.columns();
    const T *pivot = vectors, *scale = pivot + channels, *shift = scale + channels;
    row.each(
        [](T& y, T x, T pivot, T scale, T shift) {
          T p = (x - pivot) * scale + shift;
          y = kSilu ? silu(p) : p;
        },
        row.out(y), row.in(x), row.shared(pivot), row.shared(scale), row.shared(shift));
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
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2;  // of dp and of dp * (x - mean)
  static constexpr int kVectors = 5;

  Groups groups;
  const X* dy;  // [samples, rows, channels]
  const X* x;   // like dy
  Parameter<T> weight, bias;
  const T* mean;  // [samples, groups]
  const T* rstd;  // [samples, groups]
  X* dx;          // like dy
  // [samples, 5, channels]: mean, scale, bias, slope and shift. p = (x - mean) * scale + bias,
  // dx = dp * scale - (x - mean) * slope - shift
  T* vectors;
  T* dweights;  // [samples, channels]: each sample's part of dweight
  T* dbiases;   // [samples, channels]

  APEX_HD GroupNormBackward of_sample(int64_t sample) const {
    GroupNormBackward own = *this;
    own.mean += sample * groups.count;
    own.rstd += sample * groups.count;
    own.vectors += sample * kVectors * groups.channels;
    own.dweights += sample * groups.channels;
    own.dbiases += sample * groups.channels;
    return own;
  }

  template <class G>
  APEX_HD void before(G& group) const {
    group.each(0, groups.channels, [at = *this](int64_t c) {
      const int64_t channels = at.groups.channels, index = c / at.groups.width();
      at.vectors[c] = at.mean[index];
      at.vectors[channels + c] = at.rstd[index] * at.weight(c);
      at.vectors[2 * channels + c] = at.bias(c);
    });
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    const int64_t channels = row.columns();
    const T *mu = vectors, *scale = mu + channels, *of_bias = scale + channels;
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T dy, T x, T mu, T scale, T bias) {
          T d = x - mu, dp = activation_gradient<kSilu>(dy, d * scale + bias);
          sums[0] += dp;
          sums[1] += dp * d;
        },
        row.in(dy), row.in(x), row.shared(mu), row.shared(scale), row.shared(of_bias));
  }

  template <class G, class Sums>
  APEX_HD void between(G& group, const Sums& sums) const {
    group.each(0, groups.count, [&, at = *this](int64_t index) {
      const int64_t width = at.groups.width(), begin = index * width, end = begin + width;
      const double r = at.rstd[index], n = at.groups.size();
      double of_g = 0, of_g_xhat = 0;
      for (int64_t c = begin; c < end; ++c) {
        const Array<double, 2> s = sums(c);
        const double w = at.weight(c);
        of_g += w * s[0];
        of_g_xhat += w * s[1] * r;
        at.dbiases[c] = static_cast<T>(s[0]);
        at.dweights[c] = static_cast<T>(s[1] * r);
      }
      T *slope = at.vectors + 3 * at.groups.channels, *shift = slope + at.groups.channels;
      for (int64_t c = begin; c < end; ++c) {
        slope[c] = static_cast<T>(of_g_xhat / n * r * r);
        shift[c] = static_cast<T>(of_g / n * r);
      }
    });
  }

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t channels = row.columns();
    const T *mu = vectors, *scale = mu + channels, *of_bias = scale + channels,
            *slope = of_bias + channels, *shift = slope + channels;
    row.each(
        [](T& dx, T dy, T x, T mu, T scale, T bias, T slope, T shift) {
          T d = x - mu, dp = activation_gradient<kSilu>(dy, d * scale + bias);
          dx = dp * scale - d * slope - shift;
        },
        row.out(dx), row.in(dy), row.in(x), row.shared(mu), row.shared(scale), row.shared(of_bias),
        row.shared(slope), row.shared(shift));
  }
};

// Adds up the samples' parts of the gradients.
template <class T, class W>
struct SumsOfSamples {
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
