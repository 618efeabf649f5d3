// Layer normalization over the last `columns` elements, and its gradient, one row at a time.
//
//   xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * weight + bias
//   g = dy * weight,  dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
//
// Ba, Kiros & Hinton 2016 (https://arxiv.org/abs/1607.06450). Mean and variance are taken in one
// pass over x - pivot, for a pivot near the mean: E[x^2] - E[x]^2 loses every digit once the mean
// is 10^4 standard deviations.
#pragma once

#include "affine.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the input's storage type, W that of weight, bias and output.
template <class X, class W>
struct LayerNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 1;

  const X* x;  // [rows, columns]
  Affine<W, T> affine;
  W* y;     // [rows, columns]
  T* mean;  // [rows]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto values = row.stage(0, x);
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
      // The pivot was far off: x - pivot lost digits, so that mu is off by some ulp of the pivot,
      // and the difference above cancels. mean(x) = mu + mean(x - mu) for any mu, and for this one
      // what is added is small. Outliers have sums of their own: equal small terms that are added
      // to a large one are all rounded in the same direction.
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
    T r = T(1) / std::sqrt(variance + eps);
    row.each(
        [=, affine = affine](T& y, T x, T w, T b) {
          y = (x - mu) * r * affine.weight_or_one(w) + affine.bias_or_zero(b);
        },
        row.out(y), values, row.shared(affine.weight), row.shared(affine.bias));
    row.once([&] {
      mean[row.index()] = mu;
      rstd[row.index()] = r;
    });
  }
};

// What all backward programs of a row share. kFromOutput: `saved` is the output, from which xhat is
// recovered; else it is the input.
template <class T, class W, bool kFromOutput>
struct LayerNormXhat {
  Affine<W, T> affine;
  T mean, rstd, smallest_weight;

  APEX_HD T operator()(T saved, T w, T b) const {
    if constexpr (kFromOutput) return affine.undo(saved, w, b, smallest_weight);
    return (saved - mean) * rstd;
  }
};

template <class X, class W, bool kFromOutput>
struct LayerNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using Saved = std::conditional_t<kFromOutput, W, X>;
  static constexpr int kStages = 2;
  static constexpr int kSums = 2;  // dweight, dbias
  static constexpr bool kColumnsInRow = true;

  const W* dy;         // [rows, columns]
  const Saved* saved;  // [rows, columns]
  Affine<W, T> affine;
  const T* mean;      // [rows]; null when kFromOutput
  const T* rstd;      // [rows]
  X* dx;              // [rows, columns]
  W* dweight;         // [columns]
  W* dbias;           // [columns]
  T smallest_weight;  // see Affine::undo

  template <class R>
  APEX_HD LayerNormXhat<T, W, kFromOutput> xhat_of(const R& row) const {
    return {affine, kFromOutput ? T(0) : mean[row.index()], rstd[row.index()], smallest_weight};
  }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto grads = row.stage(0, dy);
    auto values = row.stage(1, saved);
    auto w = row.shared(affine.weight), b = row.shared(affine.bias);
    auto xhat_at = xhat_of(row);
    Array<T, 2> sums = row.template sums_and_columns<2, kSums>(
        [=](T dy, T saved, T w, T b) {
          T g = dy * xhat_at.affine.weight_or_one(w);
          return Array<T, 2>{{g, g * xhat_at(saved, w, b)}};
        },
        column_terms(row), grads, values, w, b);
    T mean_g = sums[0] / row.columns(), mean_g_xhat = sums[1] / row.columns();
    row.each(
        [=](T& dx, T dy, T saved, T w, T b) {
          T g = dy * xhat_at.affine.weight_or_one(w);
          dx = xhat_at.rstd * (g - mean_g - xhat_at(saved, w, b) * mean_g_xhat);
        },
        row.out(dx), grads, values, w, b);
  }

  template <class R>
  APEX_HD auto column_terms(const R& row) const {
    auto xhat_at = xhat_of(row);
    return [=](Array<T, kSums>& sums, T dy, T saved, T w, T b) {
      sums[0] += dy * xhat_at(saved, w, b);
      sums[1] += dy;
    };
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(column_terms(row), row.staged(0, dy), row.staged(1, saved),
                                   row.shared(affine.weight), row.shared(affine.bias));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
    dbias[column] = convert<W>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
