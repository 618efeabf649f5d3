// Focal loss of a row of logits, Lin et al. 2017 (https://arxiv.org/abs/1708.02002), and its
// gradient. With z = x for the positive class and -x for the others, and smoothing s:
//
//   softplus(-z) = max(-z, 0) + log1p(exp(-|z|)) = -log(sigmoid(z))
//   bce = softplus(-z) + s / 2 * z,  m = sigmoid(-z)
//   loss = a * m^gamma * bce,  m^gamma = exp(-gamma * softplus(z))
//   dloss/dz = a * m^gamma * (s / 2 - m - gamma * (1 - m) * bce)
//
// a is alpha for the positive class, 1 - alpha for the others.
#pragma once

#include <limits>

#include "apex/math/exp.h"
#include "apex/math/log1p.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// What the target of a row says.
inline constexpr int64_t kIgnored = -2;  // any other negative number: all classes are negative

template <class T, bool kSquared>
struct FocalTerm {
  T weight, gamma, half_smoothing;

  struct Parts {
    T hits, misses;  // sigmoid(z) and sigmoid(-z)
    T bce, factor;
  };

  APEX_HD Parts parts(T z) const {
    const T magnitude = z < T(0) ? -z : z;
    const T e = exponential_no_overflow(-magnitude);
    const T share = quotient(T(1), T(1) + e);
    const T log = log1p_of_unit(e);
    const T softplus = (z < T(0) ? -z : T(0)) + log;  // of -z
    const T hits = z < T(0) ? e * share : share, misses = z < T(0) ? share : e * share;
    T power = misses * misses;
    if constexpr (!kSquared)
      power = exponential_no_overflow(-gamma * ((z < T(0) ? T(0) : z) + log));
    return {hits, misses, softplus + half_smoothing * z, weight * power};
  }

  APEX_HD T loss(T z) const {
    const Parts p = parts(z);
    return p.factor * p.bce;
  }

  APEX_HD T gradient(T z) const {
    const Parts p = parts(z);
    return p.factor * (half_smoothing - p.misses - gamma * p.hits * p.bce);
  }
};

template <class S, bool kSquared>
struct FocalLoss {
  using value_type = compute_t<S>;
  using T = value_type;
  using Term = FocalTerm<T, kSquared>;

  const S* x;              // [rows, columns]
  const int64_t* targets;  // [rows]
  int64_t classes;         // columns behind them are padding
  Term positive, negative;

  APEX_HD bool has_positive(int64_t target) const { return target >= 0 && target < classes; }
};

template <class S, bool kSquared>
struct FocalLossForward : FocalLoss<S, kSquared> {
  using Base = FocalLoss<S, kSquared>;
  using T = typename Base::T;

  T* losses;  // [rows]

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t target = this->targets[row.index()];
    T loss = T(0);
    if (target != kIgnored) {
      const auto term = this->negative;
      auto sum = [&](int64_t begin, int64_t end) {
        const auto part = row.within(begin, end);
        return part.sum([term](T x) { return term.loss(-x); }, part.ahead(part.in(this->x)));
      };
      if (!this->has_positive(target)) {
        loss = sum(0, this->classes);
        // A GPU cannot raise an error here: a target without a class gives NaN.
        if (target >= 0) loss = std::numeric_limits<T>::quiet_NaN();
      } else {
        const T own = convert<T>(row.in(this->x).data[target]);
        loss = sum(0, target) + sum(target + 1, this->classes) + this->positive.loss(own);
      }
    }
    row.once([&] { losses[row.index()] = loss; });
  }
};

// A vector whose elements lie `stride` apart.
template <class T>
struct Strided {
  const T* data;
  int64_t stride;

  APEX_HD T operator[](int64_t index) const { return data[index * stride]; }
};

template <class S, bool kSquared>
struct FocalLossBackward : FocalLoss<S, kSquared> {
  using Base = FocalLoss<S, kSquared>;
  using T = typename Base::T;

  Strided<T> grad_losses;  // [rows]
  S* grad_x;               // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t target = this->targets[row.index()];
    auto clear = [](const auto& part, S* result) {
      part.each([](T& dx) { dx = T(0); }, part.out(result));
    };
    if (target == kIgnored) return clear(row, grad_x);
    T grad = grad_losses[row.index()];
    if (target >= this->classes) grad = std::numeric_limits<T>::quiet_NaN();
    const auto negative = this->negative, positive = this->positive;
    const auto part = row.within(0, this->classes);
    const auto out = part.ahead(part.out(grad_x));
    const auto in = part.ahead(part.in(this->x));
    part.each([=](T& dx, T x) { dx = -grad * negative.gradient(-x); }, out, in);
    if (this->has_positive(target)) {
      row.at(
          target, [=](T& dx, T x) { dx = grad * positive.gradient(x); }, row.out(grad_x),
          row.in(this->x));
    }
    if (this->classes < row.columns()) clear(row.within(this->classes, row.columns()), grad_x);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
