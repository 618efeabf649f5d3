// Layer normalization over the last `columns` elements, and its gradient, one row at a time.
//
// Ba, Kiros & Hinton 2016 (https://arxiv.org/abs/1607.06450); the formulas are in
// apex/math/norm/layer.h.
#pragma once

#include "apex/math/norm/layer.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// X is the input's storage type, W that of weight, bias and output.
template <class X, class W>
struct LayerNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = X;

  const X* x;  // [rows, columns]
  Affine<W, T> affine;
  W* y;     // [rows, columns]
  T* mean;  // [rows]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    layer_norm_row(row, row.stage(x), affine, eps, y, mean, rstd);
  }
};

// kFromOutput: `saved` is the output, from which xhat is recovered; else it is the input.
template <class X, class W, bool kFromOutput>
struct LayerNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using Saved = std::conditional_t<kFromOutput, W, X>;
  using staged_type = X;
  static constexpr int kSums = 2;  // dweight, dbias
  static constexpr bool kColumnsInRow = true;

  const W* dy;         // [rows, columns]
  const Saved* saved;  // [rows, columns]
  Affine<W, T> affine;
  const T* mean;     // [rows]; null when kFromOutput
  const T* rstd;     // [rows]
  X* dx;             // [rows, columns]
  W* dweight;        // [columns]
  W* dbias;          // [columns]
  T smallest_scale;  // see Affine::undo

  APEX_HD LayerGradient<T, W, kFromOutput> gradient(int64_t row) const {
    return {affine, kFromOutput ? T(0) : mean[row], rstd[row], smallest_scale};
  }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto grads = row.stage(dy);
    auto values = row.stage(saved);
    auto w = row.shared(affine.weight), b = row.shared(affine.bias);
    auto of_row = gradient(row.index());
    Array<T, 2> sums = row.template sums_and_columns<2, kSums>(
        of_row.row_terms(), of_row.column_terms(), grads, values, w, b);
    auto dx_at = of_row.dx(sums, row.columns());
    row.each([=](T& dx, T dy, T saved, T w, T b) { dx = dx_at(dy, saved, w, b); }, row.out(dx),
             grads, values, w, b);
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>([&](int64_t index) { return gradient(index).column_terms(); },
                                   row.in(dy), row.in(saved), row.shared(affine.weight),
                                   row.shared(affine.bias));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
    dbias[column] = convert<W>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
