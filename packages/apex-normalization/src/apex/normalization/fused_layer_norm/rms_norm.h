// Root-mean-square normalization over the last `columns` elements, and its gradient, a row at a
// time.
//
//   xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps),  y = xhat * weight
//   g = dy * weight,  dx = rstd * (g - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//
// Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467).
#pragma once

#include "affine.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the input's storage type, W that of weight and output.
template <class X, class W>
struct RmsNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 1;

  const X* x;  // [rows, columns]
  Affine<W, T> affine;
  W* y;     // [rows, columns]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto values = row.stage(0, x);
    T mean_square = row.sum([](T x) { return x * x; }, values) / row.columns();
    T r = T(1) / std::sqrt(mean_square + eps);
    row.each([=, affine = affine](T& y, T x, T w) { y = x * r * affine.weight_or_one(w); },
             row.out(y), values, row.shared(affine.weight));
    row.once([&] { rstd[row.index()] = r; });
  }
};

// kFromOutput: `saved` is the output, from which xhat is recovered; else it is the input.
template <class T, class W, bool kFromOutput>
struct RmsNormXhat {
  Affine<W, T> affine;
  T rstd, smallest_weight;

  APEX_HD T operator()(T saved, T w) const {
    if constexpr (kFromOutput) return affine.undo(saved, w, T(0), smallest_weight);
    return saved * rstd;
  }
};

template <class X, class W, bool kFromOutput>
struct RmsNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using Saved = std::conditional_t<kFromOutput, W, X>;
  static constexpr int kStages = 2;
  static constexpr int kSums = 1;  // dweight
  static constexpr bool kColumnsInRow = true;

  const W* dy;         // [rows, columns]
  const Saved* saved;  // [rows, columns]
  Affine<W, T> affine;
  const T* rstd;      // [rows]
  X* dx;              // [rows, columns]
  W* dweight;         // [columns]
  T smallest_weight;  // see Affine::undo

  template <class R>
  APEX_HD RmsNormXhat<T, W, kFromOutput> xhat_of(const R& row) const {
    return {affine, rstd[row.index()], smallest_weight};
  }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto grads = row.stage(0, dy);
    auto values = row.stage(1, saved);
    auto w = row.shared(affine.weight);
    auto xhat_at = xhat_of(row);
    Array<T, 1> sum = row.template sums_and_columns<1, kSums>(
        [=](T dy, T saved, T w) {
          return Array<T, 1>{{dy * xhat_at.affine.weight_or_one(w) * xhat_at(saved, w)}};
        },
        column_terms(row), grads, values, w);
    T mean_g_xhat = sum[0] / row.columns();
    row.each(
        [=](T& dx, T dy, T saved, T w) {
          T g = dy * xhat_at.affine.weight_or_one(w);
          dx = xhat_at.rstd * (g - xhat_at(saved, w) * mean_g_xhat);
        },
        row.out(dx), grads, values, w);
  }

  template <class R>
  APEX_HD auto column_terms(const R& row) const {
    auto xhat_at = xhat_of(row);
    return [=](Array<T, kSums>& sums, T dy, T saved, T w) { sums[0] += dy * xhat_at(saved, w); };
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(column_terms(row), row.staged(0, dy), row.staged(1, saved),
                                   row.shared(affine.weight));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
