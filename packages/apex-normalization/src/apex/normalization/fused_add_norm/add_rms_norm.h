// Root-mean-square normalization of a sum of two matrices, and its gradient, one row at a time.
//
//   s = x + residual, rounded to its dtype,  y = RMS norm of s
//   dx = dresidual = gradient of s through the norm + ds
//
// Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467), after a residual connection; the
// formulas are in apex/math/norm/rms.h.
#pragma once

#include "add.h"
#include "apex/math/norm/rms.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// X is the storage type of x and y, S that of residual and sum, W that of the weight.
template <class X, class S, class W>
struct AddRmsNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = Narrower<X, S>;

  Sum<X, S> sum;
  Affine<W, T> affine;
  X* y;     // [rows, columns]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    rms_norm_row(row, sum.stage(row), affine, eps, y, rstd);
  }
};

template <class X, class S, class W, bool kHasSumGrad>
struct AddRmsNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = Narrower<X, S>;
  static constexpr int kSums = 1;  // dweight
  static constexpr bool kColumnsInRow = true;

  const X* dy;   // [rows, columns]
  const S* sum;  // [rows, columns]
  Affine<W, T> affine;
  const T* rstd;  // [rows]
  InputGrads<X, S, kHasSumGrad> grads;
  W* dweight;  // [columns]

  APEX_HD RmsGradient<T, W, false> gradient(int64_t row) const { return {affine, rstd[row], T(0)}; }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto dys = row.stage(dy);
    auto sums = row.stage(sum);
    auto w = row.shared(affine.weight);
    auto of_row = gradient(row.index());
    Array<T, 1> total = row.template sums_and_columns<1, kSums>(
        of_row.row_terms(), of_row.column_terms(), dys, sums, w);
    grads.store(row, of_row.dx(total, row.columns()), dys, sums, w);
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>([&](int64_t index) { return gradient(index).column_terms(); },
                                   row.in(dy), row.in(sum), row.shared(affine.weight));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
