// One row of layer normalization and of its gradient, for every op that has such rows.
//
//   xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * scale + bias
//   g = dy * scale,  dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
//
// where scale is the weight, or 1 + weight if that is zero-centred.
//
// Ba, Kiros & Hinton 2016 (https://arxiv.org/abs/1607.06450). Mean and variance are taken in one
// pass over x - pivot, for a pivot near the mean: E[x^2] - E[x]^2 loses every digit once the mean
// is 10^4 standard deviations.
#pragma once

#include "apex/math/norm/affine.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
struct LayerStatistics {
  T mean, rstd;
};

// `values` is a view of this row that may be read several times.
template <class R, class View, class T>
APEX_HD LayerStatistics<T> layer_statistics(R& row, const View& values, T eps) {
  T pivot = row.pivot(values), n = static_cast<T>(row.columns());
  Array<T, 2> sums = row.template sums<2>(
      [=](T x) {
        T d = x - pivot;
        return Array<T, 2>{{d, d * d}};
      },
      values);
  T shift = sums[0] / n, mu = pivot + shift;
  T variance = sums[1] / n - shift * shift;
  if (shift * shift > variance) {
    // The pivot was far off: x - pivot lost digits, so that mu is off by some ulp of the pivot, and
    // the difference above cancels. mean(x) = mu + mean(x - mu) for any mu, and for this one what
    // is added is small. Outliers have sums of their own: equal small terms that are added to a
    // large one are all rounded in the same direction.
    T limit = shift * shift / T(4);
    auto split = [=](T term, T square) {
      bool is_large = square > limit;
      return Array<T, 2>{{is_large ? T(0) : term, is_large ? term : T(0)}};
    };
    sums = row.template sums<2>([=](T x) { return split(x - mu, (x - mu) * (x - mu)); }, values);
    mu += (sums[0] + sums[1]) / n;
    auto squares = [=](T x) { return split((x - mu) * (x - mu), (x - mu) * (x - mu)); };
    sums = row.template sums<2>(squares, values);
    variance = (sums[0] + sums[1]) / n;
  }
  return {mu, T(1) / std::sqrt(variance + eps)};
}

// The whole forward of a row: y, and the row's entries of mean and rstd.
template <class R, class View, class W, class T, class Y>
APEX_HD void layer_norm_row(R& row, const View& values, const Affine<W, T>& affine, T eps, Y* y,
                            T* mean, T* rstd) {
  auto [mu, r] = layer_statistics(row, values, eps);
  row.each(
      [=, mu = mu, r = r](T& y, T x, T w, T b) {
        y = (x - mu) * r * affine.scale(w) + affine.bias_or_zero(b);
      },
      row.out(y), values, row.shared(affine.weight), row.shared(affine.bias));
  row.once([&, mu = mu, r = r] {
    mean[row.index()] = mu;
    rstd[row.index()] = r;
  });
}

// The numbers of a row that its gradient is computed from. All functors are of dy, what was saved,
// weight and bias in one column. kFromOutput: what was saved is the output, from which xhat is
// recovered; else it is the input.
template <class T, class W, bool kFromOutput>
struct LayerGradient {
  Affine<W, T> affine;
  T mean, rstd, smallest_scale;  // the latter: see Affine::undo

  APEX_HD T xhat(T saved, T w, T b) const {
    if constexpr (kFromOutput) return affine.undo(saved, w, b, smallest_scale);
    return (saved - mean) * rstd;
  }

  // Terms of the sums over the row of g and g * xhat.
  APEX_HD auto row_terms() const {
    return [at = *this](T dy, T saved, T w, T b) {
      T g = dy * at.affine.scale(w);
      return Array<T, 2>{{g, g * at.xhat(saved, w, b)}};
    };
  }

  // Adds to dweight and dbias.
  APEX_HD auto column_terms() const {
    return [at = *this](Array<T, 2>& sums, T dy, T saved, T w, T b) {
      sums[0] += dy * at.xhat(saved, w, b);
      sums[1] += dy;
    };
  }

  APEX_HD auto dx(const Array<T, 2>& sums, int64_t columns) const {
    T mean_g = sums[0] / columns, mean_g_xhat = sums[1] / columns;
    return [=, at = *this](T dy, T saved, T w, T b) {
      T g = dy * at.affine.scale(w);
      return at.rstd * (g - mean_g - at.xhat(saved, w, b) * mean_g_xhat);
    };
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
