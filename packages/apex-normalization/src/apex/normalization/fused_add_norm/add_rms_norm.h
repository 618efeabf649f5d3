// Root-mean-square normalization of a sum of two matrices, and its gradient, one row at a time.
//
//   s = x + residual, rounded to its dtype
//   xhat = s * rstd,  rstd = 1 / sqrt(mean(s^2) + eps),  y = xhat * weight
//   g = dy * weight,  dx = dresidual = rstd * (g - xhat * mean(g * xhat)) + ds
//   dweight = sum over rows of dy * xhat
//
// Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467), after a residual connection.
#pragma once

#include "add.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the storage type of x and y, S that of residual and sum, W that of the weight.
template <class X, class S, class W>
struct AddRmsNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 2;

  const X* x;         // [rows, columns]
  const S* residual;  // [rows, columns]
  const W* weight;    // [columns]
  X* y;               // [rows, columns]
  S* sum;             // [rows, columns]
  T* rstd;            // [rows]
  T eps;

  template <class R>
  APEX_ADD_NORM_ROW void row(R& row) const {
    with_sum(row, x, residual, sum, [&](const auto&... terms) {
      T mean_square = row.sum(
                          [](auto... values) {
                            T sum = stored_sum<S>(values...);
                            return sum * sum;
                          },
                          terms...) /
                      row.columns();
      T scale = T(1) / std::sqrt(mean_square + eps);
      store_outputs(
          row, [=](T sum, T w) { return sum * scale * w; }, y, sum, terms..., row.shared(weight));
      row.once([&] { rstd[row.index()] = scale; });
    });
  }
};

template <class X, class S, class W, bool kHasSumGrad>
struct AddRmsNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 2;
  static constexpr int kSums = 1;  // dweight
  static constexpr bool kColumnsInRow = true;

  const X* dy;      // [rows, columns]
  const S* sum;     // [rows, columns]
  const W* weight;  // [columns]
  const T* rstd;    // [rows]
  InputGrads<X, S, kHasSumGrad> grads;
  W* dweight;  // [columns]

  template <class R>
  APEX_ADD_NORM_ROW void row(R& row) const {
    auto dys = row.stage(0, dy);
    auto sums = row.stage(1, sum);
    auto w = row.shared(weight);
    T scale = rstd[row.index()];
    Array<T, 1> total = row.template sums_and_columns<1, kSums>(
        [=](T dy, T sum, T w) { return Array<T, 1>{{dy * w * (sum * scale)}}; }, column_terms(row),
        dys, sums, w);
    T mean_g_xhat = total[0] / row.columns();
    auto gradient = [=](T dy, T sum, T w) { return scale * (dy * w - sum * scale * mean_g_xhat); };
    grads.store(row, gradient, dys, sums, w);
  }

  template <class R>
  APEX_HD auto column_terms(const R& row) const {
    T scale = rstd[row.index()];
    return [=](Array<T, kSums>& sums, T dy, T sum, T) { sums[0] += dy * (sum * scale); };
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(column_terms(row), row.staged(0, dy), row.staged(1, sum),
                                   row.shared(weight));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
