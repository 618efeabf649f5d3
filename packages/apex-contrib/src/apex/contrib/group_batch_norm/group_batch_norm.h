// What batch normalization of rows of channels needs beside apex/math/batch_norm/: statistics in
// one pass without a division per element, and the gradient's sums in the pass of the ReLU's.
//
//   d = x - pivot,  mean = pivot + mean(d),  var = mean(d^2) - mean(d)^2
//   masked = dy, or 0 where y <= 0;  sums of masked, and of masked * (x - mean)
//
// E[d^2] - E[d]^2 keeps its digits, because the pivot is near the mean: the median of three rows.
// Ioffe & Szegedy 2015 (https://arxiv.org/abs/1502.03167).
#pragma once

#include "apex/math/batch_norm/parts.h"
#include "apex/math/batch_norm/statistics.h"
#include "apex/math/median.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// The same pivots in each row: channels are narrow, and rows of x are walked side by side.
template <class X>
struct BatchNormPivots {
  using value_type = compute_t<X>;
  using T = value_type;

  Array<const X*, 3> rows;  // of x, [channels] each
  T* pivots;                // [rows side by side, channels]

  template <class R>
  APEX_HD void row(R& row) const {
    row.each([](T& pivot, T a, T b, T c) { pivot = median(a, b, c); }, row.out(pivots),
             row.from(rows[0]), row.from(rows[1]), row.from(rows[2]));
  }
};

template <class X>
struct BatchNormMoments {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2, kRowsAtOnce = 4;

  const X* x;             // [rows, columns]
  const T* pivots;        // [columns]
  Statistics<T> results;  // of a part: mean - pivot, as the mean itself would lose digits of that
  double rows;
  bool is_part;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T x, T pivot) {
          T d = x - pivot;
          sums[0] += d;
          sums[1] += d * d;
        },
        row.in(x), row.shared(pivots));
  }
  template <class U>  // T, or double
  APEX_HD void finish(int64_t column, const Array<U, 2>& sums) const {
    const double share = rows > 0 ? 1 / rows : 0, shift = sums[0] * share;
    const double var = sums[1] * share - shift * shift;
    const double pivot = is_part || rows == 0 ? 0 : pivots[column];
    const double m2 = var < 0 ? 0 : var * rows;  // NaN stays
    results.store(column, Moments<double>{{rows, pivot + shift, m2}});
  }
};

// Merges the moments of parts, which are around the same pivots.
template <class T>
struct BatchNormParts : PartMoments<T, Parts> {
  const T* pivots;  // [channels]

  APEX_HD void finish(int64_t channel, const Moments<double>& moments) const {
    const double pivot = moments[0] > 0 ? pivots[channel] : 0;
    this->results.store(channel, Moments<double>{{moments[0], pivot + moments[1], moments[2]}});
  }
};

template <class X>
struct BatchNormMaskedSums {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kSums = 2;
  // Rows of 1,024 floats lie 4 KiB apart: stores of one then delay loads of the other.
  static constexpr int kRowsAtOnce = sizeof(X) == 2 ? 2 : 1;

  const X* dy;  // [rows, columns], as x, y and masked
  const X* x;
  const X* y;     // the forward's output
  const T* mean;  // [columns]
  X* masked;
  GradStatistics<T> results;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T& masked, T dy, T y, T x, T mean) {
          masked = zero_where(y <= T(0), dy);
          sums[0] += masked;
          sums[1] += masked * (x - mean);
        },
        row.out(masked), row.in(dy), row.in(y), row.in(x), row.shared(mean));
  }
  APEX_HD void finish(int64_t column, const Array<T, 2>& sums) const {
    results.store(column, sums);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
