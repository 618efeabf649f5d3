// Layer normalization of a sum of two matrices, and its gradient, one row at a time.
//
//   s = x + residual, rounded to its dtype
//   xhat = (s - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * weight + bias
//   g = dy * weight,  dx = dresidual = rstd * (g - mean(g) - xhat * mean(g * xhat)) + ds
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
//
// Ba, Kiros & Hinton 2016 (https://arxiv.org/abs/1607.06450), after a residual connection. The
// variance has a pass of its own over the row, so that rows far from zero keep their accuracy.
#pragma once

#include "add.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the storage type of x and y, S that of residual and sum, W that of weight and bias.
template <class X, class S, class W, bool kHasBias>
struct AddLayerNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 2;

  const X* x;         // [rows, columns]
  const S* residual;  // [rows, columns]
  const W* weight;    // [columns]
  const W* bias;      // [columns]; unread without kHasBias
  X* y;               // [rows, columns]
  S* sum;             // [rows, columns]
  T* mean;            // [rows]
  T* rstd;            // [rows]
  T eps;

  template <class R>
  APEX_ADD_NORM_ROW void row(R& row) const {
    with_sum(row, x, residual, sum, [&](const auto&... terms) {
      T n = static_cast<T>(row.columns());
      T mu = row.sum([](auto... values) { return stored_sum<S>(values...); }, terms...) / n;
      T variance = row.sum(
                       [=](auto... values) {
                         T deviation = stored_sum<S>(values...) - mu;
                         return deviation * deviation;
                       },
                       terms...) /
                   n;
      store(row, mu, T(1) / std::sqrt(variance + eps), terms...);
    });
  }

  template <class R, class... Terms>
  APEX_HD void store(R& row, T mu, T scale, const Terms&... terms) const {
    auto w = row.shared(weight);
    if constexpr (kHasBias) {
      store_outputs(
          row, [=](T sum, T w, T b) { return (sum - mu) * scale * w + b; }, y, sum, terms..., w,
          row.shared(bias));
    } else {
      store_outputs(row, [=](T sum, T w) { return (sum - mu) * scale * w; }, y, sum, terms..., w);
    }
    row.once([&] {
      mean[row.index()] = mu;
      rstd[row.index()] = scale;
    });
  }
};

template <class X, class S, class W, bool kHasSumGrad>
struct AddLayerNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  static constexpr int kStages = 2;
  static constexpr int kSums = 2;  // dweight, dbias
  static constexpr bool kColumnsInRow = true;

  const X* dy;      // [rows, columns]
  const S* sum;     // [rows, columns]
  const W* weight;  // [columns]
  const T* mean;    // [rows]
  const T* rstd;    // [rows]
  InputGrads<X, S, kHasSumGrad> grads;
  W* dweight;  // [columns]
  W* dbias;    // [columns]

  template <class R>
  APEX_ADD_NORM_ROW void row(R& row) const {
    auto dys = row.stage(0, dy);
    auto sums = row.stage(1, sum);
    auto w = row.shared(weight);
    T mu = mean[row.index()], scale = rstd[row.index()], n = static_cast<T>(row.columns());
    Array<T, 2> totals = row.template sums_and_columns<2, kSums>(
        [=](T dy, T sum, T w) {
          T g = dy * w;
          return Array<T, 2>{{g, g * ((sum - mu) * scale)}};
        },
        column_terms(row), dys, sums, w);
    T mean_g = totals[0] / n, mean_g_xhat = totals[1] / n;
    auto gradient = [=](T dy, T sum, T w) {
      return scale * (dy * w - mean_g - (sum - mu) * scale * mean_g_xhat);
    };
    grads.store(row, gradient, dys, sums, w);
  }

  template <class R>
  APEX_HD auto column_terms(const R& row) const {
    T mu = mean[row.index()], scale = rstd[row.index()];
    return [=](Array<T, kSums>& sums, T dy, T sum, T) {
      sums[0] += dy * ((sum - mu) * scale);
      sums[1] += dy;
    };
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>(column_terms(row), row.staged(0, dy), row.staged(1, sum),
                                   row.shared(weight));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
    dbias[column] = convert<W>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
