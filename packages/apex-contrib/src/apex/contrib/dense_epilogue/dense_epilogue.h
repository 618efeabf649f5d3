// What follows a matrix product in a dense layer: GELU, and the way back through an activation,
// with the sum over rows that is the gradient of the layer's bias.
#pragma once

#include "apex/core/types.h"
#include "apex/math/gelu.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// The gradient of an activation's input, from that of its output and what the forward kept.

struct ReluGradient {
  static constexpr bool kTakesExp = false;
  // A NaN that the forward passed on stays one, as in torch.
  template <class T>
  APEX_HD T operator()(T dy, T y) const {
    return y <= T(0) ? T(0) : dy;
  }
};

struct SigmoidGradient {
  static constexpr bool kTakesExp = false;
  template <class T>
  APEX_HD T operator()(T dy, T y) const {
    return dy * y * (T(1) - y);
  }
};

struct GeluGradient {
  static constexpr bool kTakesExp = true;
  template <class T>
  APEX_HD T operator()(T dy, T x) const {
    return dy * gelu_tanh_slope(x);
  }
};

template <class S>
struct DenseGelu {
  using value_type = compute_t<S>;
  using T = value_type;

  const S* x;  // [rows, columns], as y
  S* y;

  template <class R>
  APEX_HD void row(R& row) const {
    row.each([](T& y, T x) { y = gelu_tanh(x); }, row.ahead(row.out(y)), row.ahead(row.in(x)));
  }
};

template <class S, class Gradient>
struct DenseActivationBackward {
  using matrix_type = S;
  using value_type = compute_t<S>;
  using T = value_type;
  static constexpr int kSums = 1;

  const S* dy;     // [rows, columns], as saved and dx
  const S* saved;  // the activation's output, or GELU's input
  S* dx;
  S* dbias;  // [columns]
  bool with_sums;

  template <class R>
  APEX_HD void row(R& row) const {
    auto to = row.out(dx);
    if (with_sums) to.streamed = false;  // column_sums() reads it next
    auto gradient = [](T& dx, T dy, T kept) { dx = Gradient()(dy, kept); };
    if constexpr (Gradient::kTakesExp) {
      row.each(gradient, row.ahead(to), row.ahead(row.in(dy)), row.ahead(row.in(saved)));
    } else {
      row.each(gradient, to, row.in(dy), row.in(saved));
    }
  }

  // Of what row() has stored, rounded: on the CPU it is in the cache, and no exp is taken twice.
  template <class R>
  APEX_HD void column_sums(R& row) const {
    const S* stored = dx;
    row.template accumulate<kSums>([](Array<T, 1>& sums, T dx) { sums[0] += dx; }, row.in(stored));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dbias[column] = convert<S>(sums[0]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
