// Root-mean-square normalization over the last `columns` elements, and its gradient, a row at a
// time.
//
// Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467); the formulas are in
// apex/math/norm/rms.h.
#pragma once

#include "apex/math/norm/rms.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// X is the input's storage type, W that of weight and output.
template <class X, class W>
struct RmsNormForward {
  using value_type = compute_t<X>;
  using T = value_type;
  using staged_type = X;

  const X* x;  // [rows, columns]
  Affine<W, T> affine;
  W* y;     // [rows, columns]
  T* rstd;  // [rows]
  T eps;

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    rms_norm_row(row, row.stage(x), affine, eps, y, rstd);
  }
};

// kFromOutput: `saved` is the output, from which xhat is recovered; else it is the input.
template <class X, class W, bool kFromOutput>
struct RmsNormBackward {
  using value_type = compute_t<X>;
  using T = value_type;
  using Saved = std::conditional_t<kFromOutput, W, X>;
  using staged_type = X;
  static constexpr int kSums = 1;  // dweight
  static constexpr bool kColumnsInRow = true;

  const W* dy;         // [rows, columns]
  const Saved* saved;  // [rows, columns]
  Affine<W, T> affine;
  const T* rstd;     // [rows]
  X* dx;             // [rows, columns]
  W* dweight;        // [columns]
  T smallest_scale;  // see Affine::undo

  APEX_HD RmsGradient<T, W, kFromOutput> gradient(int64_t row) const {
    return {affine, rstd[row], smallest_scale};
  }

  template <class R>
  APEX_NORM_ROW void row(R& row) const {
    auto grads = row.stage(dy);
    auto values = row.stage(saved);
    auto w = row.shared(affine.weight);
    auto of_row = gradient(row.index());
    Array<T, 1> sum = row.template sums_and_columns<1, kSums>(
        of_row.row_terms(), of_row.column_terms(), grads, values, w);
    auto dx_at = of_row.dx(sum, row.columns());
    row.each([=](T& dx, T dy, T saved, T w) { dx = dx_at(dy, saved, w); }, row.out(dx), grads,
             values, w);
  }

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<kSums>([&](int64_t index) { return gradient(index).column_terms(); },
                                   row.in(dy), row.in(saved), row.shared(affine.weight));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dweight[column] = convert<W>(sums[0]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
