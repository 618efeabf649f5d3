// What both fused add-and-normalize ops share: the sum as it is stored, and the inputs' gradients.
#pragma once

#include <cmath>

#include "apex/core/types.h"

// Row programs here are large: on the CPU one body serves both engines that call it.
#if defined(APEX_GPU)
#define APEX_ADD_NORM_ROW APEX_DEVICE
#else
#define APEX_ADD_NORM_ROW __attribute__((noinline))
#endif

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

// The sum as it reads from memory once it is stored as S: from what is there, or from its terms.
template <class S, class T>
APEX_HD T stored_sum(T sum) {
  return sum;
}
template <class S, class T>
APEX_HD T stored_sum(T x, T residual) {
  return convert<T>(convert<S>(x + residual));
}

// Calls body(views...) with what functors of this row get to compute stored_sum() from. The CPU
// stores the sum first, and has it in its cache; a thread of a GPU cannot read what others store
// without waiting for them, but has the terms in shared memory.
template <class S, class X, class R, class Body>
APEX_HD void with_sum(R& row, const X* x, const S* residual, [[maybe_unused]] S* sum,
                      const Body& body) {
#if defined(APEX_CPU)
  auto stored = row.out(sum);
  stored.streamed = false;  // around the cache would be a detour
  row.each([](auto& s, auto x, auto r) { s = x + r; }, stored, row.in(x), row.in(residual));
  body(row.in(static_cast<const S*>(sum)));
#else
  body(row.stage(0, x), row.stage(1, residual));
#endif
}

// y = functor(sum, others...), within with_sum(), whose views come first; also stores the sum where
// with_sum() has not.
template <class S, class X, class R, class F, class... Views>
APEX_HD void store_outputs(R& row, const F& functor, X* y, [[maybe_unused]] S* sum,
                           const Views&... views) {
  using T = compute_t<X>;
#if defined(APEX_CPU)
  row.each([=](T& y, T sum, auto... others) { y = functor(sum, others...); }, row.out(y), views...);
#else
  row.each(
      [=](T& y, T& s, T x, T r, auto... others) {
        s = stored_sum<S>(x, r);
        y = functor(s, others...);
      },
      row.out(y), row.out(sum), views...);
#endif
}

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
