// Adagrad, one element at a time.
//
// Duchi, Hazan & Singer 2011, figure 1 with diagonal matrices
// (https://jmlr.org/papers/v12/duchi11a.html), in the form of torch.optim.Adagrad; with decoupled
// decay as in Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101).
#pragma once

#include <cmath>

#include "apex/math/decay.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

template <class T, bool kDecoupled>
struct AdagradStep {
  using value_type = T;

  T lr, eps, weight_decay;
  T sign;  // of the gradient: -1 to maximize

  APEX_HD void operator()(T& p, T& g, T& sum) const {
    T gradient = sign * g;
    if constexpr (!kDecoupled) gradient = add_decay(gradient, weight_decay, p);
    sum += gradient * gradient;
    T update = gradient / (std::sqrt(sum) + eps);
    if constexpr (kDecoupled) update = add_decay(update, weight_decay, p);
    p -= lr * update;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
