// Adam and AdamW, one element at a time.
//
// Kingma & Ba 2015, algorithm 1 (https://arxiv.org/abs/1412.6980); decoupled decay from
// Loshchilov & Hutter 2019, algorithm 2 (https://arxiv.org/abs/1711.05101).
#pragma once

#include <cmath>

#include "apex/core/scalar.h"
#include "apex/math/decay.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

enum class Decay { kL2, kDecoupled };

template <class T, Decay kDecay>
struct AdamStep {
  using value_type = T;

  T lr, beta1, beta2, eps, weight_decay;
  // Computed in double by the caller: 1 - 0.9f is wrong in the seventh digit.
  T alpha1, alpha2;                            // 1 - beta
  T inverse_correction1, inverse_correction2;  // 1 / (1 - beta^t), or 1 without bias correction

  T sign = T(1);  // -1 to maximize

  APEX_HD void operator()(T& p, T& g, T& m, T& v) const {
    T gradient = sign * g;
    if constexpr (kDecay == Decay::kL2) gradient = add_decay(gradient, weight_decay, p);
    m = beta1 * m + alpha1 * gradient;
    v = beta2 * v + alpha2 * gradient * gradient;
    T update = (m * inverse_correction1) / (std::sqrt(v * inverse_correction2) + eps);
    if constexpr (kDecay == Decay::kDecoupled) update = add_decay(update, weight_decay, p);
    p -= lr * update;
  }
};

// The numbers of a step before they are rounded to the compute type.
struct AdamHyper {
  double beta1, beta2, eps, weight_decay;
  bool bias_correction;
  bool maximize = false;
};

template <class T, Decay kDecay>
APEX_HD AdamStep<T, kDecay> make_adam_step(const AdamHyper& hyper, double lr, double step) {
  double correction1 = hyper.bias_correction ? 1 - pow(hyper.beta1, step) : 1;
  double correction2 = hyper.bias_correction ? 1 - pow(hyper.beta2, step) : 1;
  return {static_cast<T>(lr),
          static_cast<T>(hyper.beta1),
          static_cast<T>(hyper.beta2),
          static_cast<T>(hyper.eps),
          static_cast<T>(hyper.weight_decay),
          static_cast<T>(1 - hyper.beta1),
          static_cast<T>(1 - hyper.beta2),
          static_cast<T>(1 / correction1),
          static_cast<T>(1 / correction2),
          static_cast<T>(hyper.maximize ? -1 : 1)};
}

// Unscales the gradient, and leaves the unscaled value where it was, before the step.
template <class Step>
struct Unscaled {
  using value_type = typename Step::value_type;

  Step step;
  value_type inverse_scale;

  APEX_HD void operator()(value_type& p, value_type& g, value_type& m, value_type& v) const {
    g *= inverse_scale;
    step(p, g, m, v);
  }
};

// The step reads and writes a wide master; its rounded value goes to the model's parameter.
template <class Step>
struct WithMaster {
  using value_type = typename Step::value_type;

  Step step;

  APEX_HD void operator()(value_type& p, value_type& g, value_type& m, value_type& v,
                          value_type& master) const {
    step(master, g, m, v);
    p = master;
  }
};

// All hyper-parameters that change between steps live on the device, so that a captured graph can
// be replayed. Nothing happens when *found_inf is not zero.
template <class T, Decay kDecay, bool kMaster>
struct CapturableAdam {
  using value_type = T;

  AdamHyper hyper;
  Scalar<float> lr;
  const int* step;
  const float* inverse_scale;
  const float* found_inf;  // may be null

  APEX_HD bool skip() const { return found_inf != nullptr && *found_inf != 0; }

  APEX_HD auto prepare() const {
    Unscaled<AdamStep<T, kDecay>> unscaled{make_adam_step<T, kDecay>(hyper, lr.value(), *step),
                                           static_cast<T>(inverse_scale ? *inverse_scale : 1.0f)};
    if constexpr (kMaster) {
      return WithMaster<decltype(unscaled)>{unscaled};
    } else {
      return unscaled;
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
