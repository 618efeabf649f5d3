// What both fused add-and-normalize ops share: the sum as it is stored, and the inputs' gradients.
#pragma once

#include "apex/core/types.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// The sum of two matrices, rounded to the residual's type, and where it is stored.
template <class X, class S>
struct Sum {
  const X* x;         // [rows, columns]
  const S* residual;  // [rows, columns]
  S* stored;          // [rows, columns]

  // Stores this row's sum, and returns a view of what is stored.
  template <class R>
  APEX_HD auto stage(R& row) const {
    using T = compute_t<X>;
    return row.stage_result(stored, [](T& s, T x, T r) { s = x + r; }, row.in(x), row.in(residual));
  }
};

// Where the gradients of x and of the residual go: they are one number, rounded to X and to S.
// Where these are the same type there is one matrix for both, and `dx` is null.
template <class X, class S, bool kHasSumGrad>
struct InputGrads {
  const S* dsum;  // [rows, columns], gradient of the stored sum; unread without kHasSumGrad
  S* dresidual;   // [rows, columns]
  X* dx;          // [rows, columns]

  // gradient(values of views...) is what comes through the normalization.
  template <class R, class F, class... Views>
  APEX_HD void store(R& row, const F& gradient, const Views&... views) const {
    using T = compute_t<X>;
    constexpr bool kOne = std::is_same_v<X, S>;
    if constexpr (kOne && kHasSumGrad) {
      row.each([=](T& d, T dsum, auto... values) { d = dsum + gradient(values...); },
               row.out(dresidual), row.in(dsum), views...);
    } else if constexpr (kOne) {
      row.each([=](T& d, auto... values) { d = gradient(values...); }, row.out(dresidual),
               views...);
    } else if constexpr (kHasSumGrad) {
      row.each([=](T& d, T& dx, T dsum, auto... values) { d = dx = dsum + gradient(values...); },
               row.out(dresidual), row.out(dx), row.in(dsum), views...);
    } else {
      row.each([=](T& d, T& dx, auto... values) { d = dx = gradient(values...); },
               row.out(dresidual), row.out(dx), views...);
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
