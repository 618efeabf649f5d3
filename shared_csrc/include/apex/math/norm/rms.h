// One row of root-mean-square normalization and of its gradient, for every op that has such rows.
//
//   xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps),  y = xhat * scale
//   g = dy * scale,  dx = rstd * (g - xhat * mean(g * xhat))
//   dweight = sum over rows of dy * xhat
//
// where scale is the weight, or 1 + weight if that is zero-centred.
//
// Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467).
#pragma once

#include "apex/math/norm/affine.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The whole forward of a row: y, and the row's entry of rstd. `values` is a view of the row that
// may be read several times.
template <class R, class View, class W, class T, class Y>
APEX_HD void rms_norm_row(R& row, const View& values, const Affine<W, T>& affine, T eps, Y* y,
                          T* rstd) {
  T mean_square = row.sum([](T x) { return x * x; }, values) / row.columns();
  T r = T(1) / std::sqrt(mean_square + eps);
  row.each([=](T& y, T x, T w) { y = x * r * affine.scale(w); }, row.out(y), values,
           row.shared(affine.weight));
  row.once([&] { rstd[row.index()] = r; });
}

// The numbers of a row that its gradient is computed from. All functors are of dy, what was saved
// and weight in one column. kFromOutput: what was saved is the output, from which xhat is
// recovered; else it is the input.
template <class T, class W, bool kFromOutput>
struct RmsGradient {
  Affine<W, T> affine;
  T rstd, smallest_scale;  // the latter: see Affine::undo

  APEX_HD T xhat(T saved, T w) const {
    if constexpr (kFromOutput) return affine.undo(saved, w, T(0), smallest_scale);
    return saved * rstd;
  }

  // Terms of the sum over the row of g * xhat.
  APEX_HD auto row_terms() const {
    return [at = *this](T dy, T saved, T w) {
      return Array<T, 1>{{dy * at.affine.scale(w) * at.xhat(saved, w)}};
    };
  }

  // Adds to dweight.
  APEX_HD auto column_terms() const {
    return
        [at = *this](Array<T, 1>& sums, T dy, T saved, T w) { sums[0] += dy * at.xhat(saved, w); };
  }

  APEX_HD auto dx(const Array<T, 1>& sums, int64_t columns) const {
    T mean_g_xhat = sums[0] / columns;
    return [=, at = *this](T dy, T saved, T w) {
      T g = dy * at.affine.scale(w);
      return at.rstd * (g - at.xhat(saved, w) * mean_g_xhat);
    };
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
