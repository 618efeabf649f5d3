// Layer normalization of a sum of two matrices, and its gradient, one row at a time.
//
//   s = x + residual, rounded to its dtype,  y = layer norm of s
//   dx = dresidual = gradient of s through the norm + ds
//
// Ba, Kiros & Hinton 2016 (https://arxiv.org/abs/1607.06450), after a residual connection; the
// formulas are in apex/math/norm/layer.h.
#pragma once

#include "add.h"
#include "apex/math/norm/layer.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the storage type of x and y, S that of residual and sum, W that of weight and bias.
template <class X, class S, class W>
struct AddLayerNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = Narrower<X, S>;

  Sum<X, S> sum;
  Affine<W, T> affine;
  X* y;     // [rows, columns]
  T* mean;  // [rows]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    layer_norm_row(row, sum.stage(row), affine, eps, y, mean, rstd);
  }
};

template <class X, class S, class W, bool kHasSumGrad>
struct AddLayerNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = Narrower<X, S>;
  static constexpr int kSums = 2;  // dweight, dbias
  static constexpr bool kColumnsInRow = true;

  const X* dy;   // [rows, columns]
  const S* sum;  // [rows, columns]
  Affine<W, T> affine;
  const T* mean;  // [rows]
  const T* rstd;  // [rows]
  InputGrads<X, S, kHasSumGrad> grads;
  W* dweight;  // [columns]
  W* dbias;    // [columns]

  APEX_HD LayerGradient<T, W, false> gradient(int64_t row) const {
    return {affine, mean[row], rstd[row], T(0)};
  }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto dys = row.stage(dy);
    auto sums = row.stage(sum);
    auto w = row.shared(affine.weight), b = row.shared(affine.bias);
    auto of_row = gradient(row.index());
    Array<T, 2> totals = row.template sums_and_columns<2, kSums>(
        of_row.row_terms(), of_row.column_terms(), dys, sums, w, b);
    grads.store(row, of_row.dx(totals, row.columns()), dys, sums, w, b);
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>([&](int64_t index) { return gradient(index).column_terms(); },
                                   row.in(dy), row.in(sum), row.shared(affine.weight),
                                   row.shared(affine.bias));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
    dbias[column] = convert<W>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
