// LARS: momentum SGD with a learning rate per tensor, from the norms of parameter and gradient.
//
// You, Gitman & Ginsburg 2017, algorithm 1 (https://arxiv.org/abs/1708.03888): velocity in
// parameter units, the learning rate already in it.
#pragma once

#include <cmath>

#include "apex/math/decay.h"
#include "apex/math/with_copy.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

template <class T>
struct LarsStep {
  using value_type = T;

  // Of this tensor: its learning rate times gradient_scale and times weight_decay.
  T gain, decay;
  T momentum;
  bool nesterov;
  bool first_run;  // the buffer's content is not read: it counts as 0

  APEX_HD void operator()(T& p, T& g) const { p -= add_decay(gain * g, decay, p); }

  APEX_HD void operator()(T& p, T& g, T& buffer) const {
    T update = add_decay(gain * g, decay, p);
    T kept = momentum * buffer;
    buffer = (first_run ? T(0) : kept) - update;
    p += nesterov ? momentum * buffer - update : buffer;
  }
};

// The step of every tensor of the lists.
template <class T, bool kCopies>
struct LarsSteps {
  T lr, momentum, weight_decay, trust_coefficient, eps;
  T gradient_scale;      // 1 / loss scale; negative to maximize
  const T* grad_norms;   // [tensors], before gradient_scale; null: no ratio
  const T* param_norms;  // [tensors]
  bool nesterov, first_run;

  APEX_HD T ratio(int64_t tensor) const {
    if (grad_norms == nullptr) return T(1);
    T grad_norm = grad_norms[tensor] * std::abs(gradient_scale);
    T param_norm = param_norms[tensor];
    if (grad_norm == T(0) || !has_ratio(param_norm)) return T(1);
    return trust_coefficient * param_norm / (grad_norm + weight_decay * param_norm + eps);
  }

  APEX_HD auto for_tensor(int64_t tensor) const {
    T own_lr = lr * ratio(tensor);
    LarsStep<T> step{own_lr * gradient_scale, own_lr * weight_decay, momentum, nesterov, first_run};
    if constexpr (kCopies) {
      return WithCopy<LarsStep<T>>{step};
    } else {
      return step;
    }
  }
};

// The numbers of a step before they are rounded to the compute type.
struct LarsHyper {
  double lr, momentum, weight_decay, trust_coefficient, eps, gradient_scale;
  bool nesterov, first_run;
};

// Steps whose learning rate may live on the device. Nothing happens where *noop_flag is not 0.
template <class T, bool kCopies>
struct LarsLaunch {
  LarsHyper hyper;
  const T* grad_norms;
  const T* param_norms;
  const float* device_lr;  // the learning rate if not null
  const int* noop_flag;    // may be null

  APEX_HD bool skip() const { return noop_flag != nullptr && *noop_flag != 0; }

  APEX_HD LarsSteps<T, kCopies> prepare() const {
    return {static_cast<T>(device_lr ? *device_lr : hyper.lr),
            static_cast<T>(hyper.momentum),
            static_cast<T>(hyper.weight_decay),
            static_cast<T>(hyper.trust_coefficient),
            static_cast<T>(hyper.eps),
            static_cast<T>(hyper.gradient_scale),
            grad_norms,
            param_norms,
            hyper.nesterov,
            hyper.first_run};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
