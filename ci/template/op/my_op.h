// my_op: says in one sentence what it computes; here, each row times its mean.
//
//   y = x * mean(x)
//   dx = dy * mean(x) + mean(dy * x)
//
// Source: the paper and the number of the equation.
#pragma once

#include "apex/core/types.h"

namespace apex::my_package {
inline namespace APEX_BACKEND_NS {

template <class S>
struct MyOpForward {
  using value_type = compute_t<S>;
  using staged_type = S;  // a row is read from memory once, and used twice

  const S* x;  // [rows, columns]
  S* y;        // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    auto values = row.stage(x);
    T mean = row.sum([](T v) { return v; }, values) / static_cast<T>(row.columns());
    row.each([=](T& out, T v) { out = v * mean; }, row.out(y), values);
  }
};

template <class S>
struct MyOpBackward {
  using value_type = compute_t<S>;
  using staged_type = S;

  const S *dy, *x;  // [rows, columns]
  S* dx;            // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    auto gradients = row.stage(dy), values = row.stage(x);
    Array<T, 2> sums =
        row.template sums<2>([](T g, T v) { return Array<T, 2>{{v, g * v}}; }, gradients, values);
    T n = static_cast<T>(row.columns()), mean = sums[0] / n, shift = sums[1] / n;
    row.each([=](T& out, T g) { out = g * mean + shift; }, row.out(dx), gradients);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::my_package
