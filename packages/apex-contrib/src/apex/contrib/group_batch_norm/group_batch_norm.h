// What batch normalization of rows of channels needs beside apex/math/batch_norm/: pivots for a
// CPU, the merging of parts around them, and the gradient's sums in the pass of the ReLU's.
//
//   masked = dy, or 0 where y <= 0;  sums of masked, and of masked * (x - mean)
//
// Ioffe & Szegedy 2015 (https://arxiv.org/abs/1502.03167).
#pragma once

#include "apex/math/batch_norm/parts.h"
#include "apex/math/batch_norm/pivots.h"

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
  using matrix_type = X;
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
