// Per-channel statistics of batch normalization, over one tensor and over parts.
//
//   mean, biased variance                      of all elements of a channel
//   sum of dy, sum of dy * (x - mean)          what the gradient needs of them
//
// Where a tensor is reduced to parts, see parts.h, these are merged in double: they are few, and a
// sum in float over ten thousand rows would lose what the last digits hold.
// Ioffe & Szegedy 2015 (https://arxiv.org/abs/1502.03167).
#pragma once

#include <cmath>

#include "apex/math/welford.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What is stored of a channel's moments. Pointers are to [channels]; those that are null are not
// written.
template <class T>
struct Statistics {
  T* mean;
  T* variance;           // unbiased if inv_std is given (0 of one element), else biased
  T* inv_std = nullptr;  // 1 / sqrt(biased variance + eps)
  double eps = 0.0;
  T* running_mean = nullptr;      // gets the share `momentum` of mean, as running_variance does of
  T* running_variance = nullptr;  // the unbiased variance
  double momentum = 0.0;
  int64_t* count = nullptr;        // one number, gets this:
  int64_t elements = 0;            // per channel
  int64_t* num_batches = nullptr;  // one number, gets one more

  template <class M>
  APEX_HD void store(int64_t channel, const Moments<M>& moments) const {
    const double n = moments[0], m2 = moments[2], biased = n > 0.0 ? m2 / n : 0.0;
    mean[channel] = static_cast<T>(moments[1]);
    variance[channel] = static_cast<T>(inv_std ? m2 / (n > 1.0 ? n - 1.0 : 1.0) : biased);
    if (inv_std) inv_std[channel] = static_cast<T>(1.0 / std::sqrt(biased + eps));
    if (running_mean) update(running_mean[channel], mean[channel]);
    if (running_variance) update(running_variance[channel], variance[channel]);
    if (count && channel == 0) *count = elements;
    if (num_batches && channel == 0) ++*num_batches;
  }

 private:
  APEX_HD void update(T& running, T value) const {
    running = static_cast<T>(running + momentum * (static_cast<double>(value) - running));
  }
};

// The moments of each column.
template <class X>
struct ColumnMoments {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 3;

  const X* x;  // [rows, columns]
  Statistics<T> results;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>([](Moments<T>& moments, T x) { add_number(moments, x); },
                                   row.in(x));
  }
  template <class M>  // T, or double
  APEX_HD void merge(Moments<M>& total, const Moments<M>& part) const {
    merge_moments(total, part);
  }
  template <class M>
  APEX_HD void finish(int64_t column, const Moments<M>& moments) const {
    results.store(column, moments);
  }
};

// The moments of each row, in two passes over a row that is in the cache.
template <class X>
struct RowMoments {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = X;

  const X* x;   // [rows, columns]
  T* mean;      // [rows]
  T* variance;  // [rows], biased

  template <class R>
  APEX_HD void row(R& row) const {
    auto values = row.stage(x);
    T mu = row.sum([](T x) { return x; }, values) / row.columns();
    T m2 = row.sum([=](T x) { return (x - mu) * (x - mu); }, values);
    row.once([&] {
      mean[row.index()] = mu;
      variance[row.index()] = m2 / row.columns();
    });
  }
};

// Merges the moments of parts. `Counts` tells how many elements per channel a part has.
template <class T, class Counts>
struct PartMoments {
  using value_type = double;
  static constexpr int kSums = 3;

  const T* part_mean;      // [parts, channels]
  const T* part_variance;  // [parts, channels], biased
  Counts counts;
  Statistics<T> results;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [&](int64_t part) {
          const double n = static_cast<double>(counts(part));
          return [n](Moments<double>& total, double mean, double variance) {
            merge_moments(total, Moments<double>{{n, mean, variance * n}});
          };
        },
        row.in(part_mean), row.in(part_variance));
  }
  APEX_HD void merge(Moments<double>& total, const Moments<double>& part) const {
    merge_moments(total, part);
  }
  APEX_HD void finish(int64_t channel, const Moments<double>& moments) const {
    results.store(channel, moments);
  }
};

// What is stored of a channel's sums. Pointers are to [channels].
template <class T>
struct GradStatistics {
  T* sum_dy;
  T* sum_dy_xmu;
  const T* inv_std = nullptr;  // with the next one, or null
  T* weight_grad = nullptr;    // sum_dy_xmu * inv_std

  template <class U>
  APEX_HD void store(int64_t channel, const Array<U, 2>& sums) const {
    sum_dy[channel] = static_cast<T>(sums[0]);
    sum_dy_xmu[channel] = static_cast<T>(sums[1]);
    if (weight_grad) weight_grad[channel] = sum_dy_xmu[channel] * inv_std[channel];
  }
};

// Sums over each column of dy and of dy * (x - mean).
template <class X>
struct ColumnGradSums {
  using matrix_type = X;
  using value_type = compute_t<X>;
  using storage_type = X;
  using T = value_type;
  static constexpr int kSums = 2, kRowsAtOnce = 2;

  const X* dy;    // [rows, columns]
  const X* x;     // [rows, columns]
  const T* mean;  // [columns]
  GradStatistics<T> results;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T dy, T x, T mean) {
          sums[0] += dy;
          sums[1] += dy * (x - mean);
        },
        row.in(dy), row.in(x), row.shared(mean));
  }
  APEX_HD void finish(int64_t column, const Array<T, 2>& sums) const {
    results.store(column, sums);
  }
};

// A per-channel vector spread over the columns that are summed: row r holds that of r % channels.
template <class T>
struct Spread {
  using value_type = T;

  const T* vector;  // [channels]
  T* spread;        // [rows, columns]
  int64_t channels;

  template <class R>
  APEX_HD void row(R& row) const {
    T value = vector[row.index() % channels];
    row.each([=](T& out) { out = value; }, row.out(spread));
  }
};

// The same over each row, whose channel is its number modulo `channels`.
template <class X>
struct RowGradSums {
  using value_type = compute_t<X>;
  using T = value_type;

  const X* dy;    // [rows, columns]
  const X* x;     // [rows, columns]
  const T* mean;  // [channels]
  T* sum_dy;      // [rows], of each channel side by side where there are `parts`
  T* sum_dy_xmu;  // like sum_dy
  int64_t channels;
  int64_t parts = 0;

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t channel = row.index() % channels;
    const int64_t at = parts > 0 ? channel * parts + row.index() / channels : row.index();
    T mu = mean[channel];
    Array<T, 2> sums = row.template sums<2>(
        [=](T dy, T x) { return Array<T, 2>{{dy, dy * (x - mu)}}; }, row.in(dy), row.in(x));
    row.once([&] {
      sum_dy[at] = sums[0];
      sum_dy_xmu[at] = sums[1];
    });
  }
};

// Adds up the sums of parts.
template <class T>
struct PartSums {
  using matrix_type = T;
  using value_type = double;
  static constexpr int kSums = 2;

  const T* part_dy;      // [parts, channels]
  const T* part_dy_xmu;  // [parts, channels]
  GradStatistics<T> results;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<double, 2>& sums, double dy, double dy_xmu) {
          sums[0] += dy;
          sums[1] += dy_xmu;
        },
        row.in(part_dy), row.in(part_dy_xmu));
  }
  APEX_HD void finish(int64_t channel, const Array<double, 2>& sums) const {
    results.store(channel, sums);
  }
};

// Merges the moments of each row's parts, which have equally many elements.
template <class T>
struct EqualMoments {
  using value_type = T;

  const T* part_mean;      // [channels, parts]
  const T* part_variance;  // [channels, parts], biased
  double count;            // elements per channel
  Statistics<T> results;

  template <class R>
  APEX_HD void row(R& row) const {
    auto means = row.in(part_mean);
    T mu = row.sum([](T mean) { return mean; }, means) / row.columns();
    T sum = row.sum([=](T mean, T variance) { return variance + (mean - mu) * (mean - mu); }, means,
                    row.in(part_variance));
    const double variance = sum / row.columns();
    row.once([&] { results.store(row.index(), Moments<double>{{count, mu, variance * count}}); });
  }
};

// Adds up the sums of each row's parts.
template <class T>
struct EqualSums {
  using value_type = T;

  const T* part_dy;      // [channels, parts]
  const T* part_dy_xmu;  // [channels, parts]
  GradStatistics<T> results;

  template <class R>
  APEX_HD void row(R& row) const {
    Array<T, 2> sums =
        row.template sums<2>([](T dy, T dy_xmu) { return Array<T, 2>{{dy, dy_xmu}}; },
                             row.in(part_dy), row.in(part_dy_xmu));
    row.once([&] { results.store(row.index(), sums); });
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
