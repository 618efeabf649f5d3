// my_op: says in one sentence what it computes; here, each row minus its mean.
//
//   y = x - mean(x)
//
// Source: the paper and the number of the equation.
#pragma once

#include "apex/core/types.h"

namespace apex::my_package {
inline namespace APEX_BACKEND_NS {

template <class S>
struct MyOp {
  using value_type = compute_t<S>;
  static constexpr int kStages = 1;  // a row is read from memory once, and used twice

  const S* x;  // [rows, columns]
  S* y;        // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    auto values = row.stage(0, x);
    T mean = row.sum([](T v) { return v; }, values) / static_cast<T>(row.columns());
    row.each([=](T& out, T v) { out = v - mean; }, row.out(y), values);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::my_package
