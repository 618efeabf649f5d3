// Adam and AdamW, one element at a time; LAMB takes the same update.
//
// Kingma & Ba 2015, algorithm 1 (https://arxiv.org/abs/1412.6980); decoupled decay from
// Loshchilov & Hutter 2019, algorithm 2 (https://arxiv.org/abs/1711.05101). A last column makes it
// AMSGrad: Reddi, Kale & Kumar 2018, algorithm 2 (https://arxiv.org/abs/1904.09237).
#pragma once

#include <cmath>

#include "apex/core/step_numbers.h"
#include "apex/math/clip.h"
#include "apex/math/decay.h"
#include "apex/math/stochastic_rounding.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The running averages of a gradient and of its square.
template <class T>
struct Moments {
  T beta1, beta2;
  T alpha1, alpha2;  // weights of the gradient and of its square

  APEX_HD void update(T gradient, T& m, T& v) const {
    m = multiply_add(beta1, m, alpha1 * gradient);
    v = multiply_add(beta2, v, alpha2 * gradient * gradient);
  }
};

// 1 - beta in double: 1 - 0.9f is wrong in the seventh digit.
template <class T>
APEX_HD Moments<T> make_moments(double beta1, double beta2, bool averaging = true) {
  return {static_cast<T>(beta1), static_cast<T>(beta2), static_cast<T>(averaging ? 1 - beta1 : 1),
          static_cast<T>(1 - beta2)};
}

// Where the moments lead, without learning rate.
template <class T>
struct AdamDirection {
  T inverse_correction1, inverse_correction2;  // 1 / (1 - beta^t), or 1 without bias correction
  T eps;
  T decay;  // of the parameter; 0 where the decay is part of the gradient

  APEX_HD T operator()(T p, T m, T v) const {
    return add_decay((m * inverse_correction1) / (std::sqrt(v * inverse_correction2) + eps), decay,
                     p);
  }
};

// New moments, and where they lead.
template <class T>
struct AdamUpdate {
  using value_type = T;

  T gradient_factor;  // -1 to maximize, and the scale of gradients
  T l2_decay;         // part of the gradient; 0 where the decay is decoupled
  Moments<T> moments;
  AdamDirection<T> direction;

  APEX_HD T operator()(T p, T g, T& m, T& v) const {
    moments.update(add_decay(gradient_factor * g, l2_decay, p), m, v);
    return direction(p, m, v);
  }

  // AMSGrad: the largest second moment so far takes the place of the present one. As in
  // torch.optim, that is the largest before bias correction.
  APEX_HD T operator()(T p, T g, T& m, T& v, T& largest) const {
    moments.update(add_decay(gradient_factor * g, l2_decay, p), m, v);
    largest = max_propagating_nan(largest, v);
    return direction(p, m, largest);
  }
};

template <class T>
struct AdamStep {
  using value_type = T;

  AdamUpdate<T> update;
  T lr;

  // `states` are both moments, and for AMSGrad the largest second one.
  template <class... States>
  APEX_HD void operator()(T& p, T& g, States&... states) const {
    p -= lr * update(p, g, states...);
  }
};

// The numbers of a step before they are rounded to the compute type.
struct AdamHyper {
  double beta1, beta2, eps, weight_decay;
  bool decoupled;
  StepNumbers numbers;
  bool grad_averaging = true;
  RoundingKey rounding = {};

  APEX_HD RoundingKey rounding_of_step() const {
    const int* step = numbers.device_step;
    return {rounding.key, step != nullptr ? static_cast<uint32_t>(*step) : rounding.step};
  }
};

template <class T>
APEX_HD AdamDirection<T> make_direction(const AdamHyper& hyper) {
  const StepNumbers& numbers = hyper.numbers;
  return {static_cast<T>(1 / numbers.correction(hyper.beta1, numbers.correction1)),
          static_cast<T>(1 / numbers.correction(hyper.beta2, numbers.correction2)),
          static_cast<T>(hyper.eps), static_cast<T>(hyper.decoupled ? hyper.weight_decay : 0)};
}

template <class T>
APEX_HD AdamUpdate<T> make_update(const AdamHyper& hyper, double gradient_factor) {
  return {static_cast<T>(gradient_factor), static_cast<T>(hyper.decoupled ? 0 : hyper.weight_decay),
          make_moments<T>(hyper.beta1, hyper.beta2, hyper.grad_averaging),
          make_direction<T>(hyper)};
}

template <class T>
APEX_HD AdamStep<T> make_adam_step(const AdamHyper& hyper, double gradient_factor) {
  return {make_update<T>(hyper, gradient_factor), static_cast<T>(hyper.numbers.learning_rate())};
}

// Unscales the gradient, and leaves the unscaled value where it was, before the step.
template <class Step>
struct Unscaled {
  using value_type = typename Step::value_type;

  Step step;
  value_type inverse_scale;

  template <class... States>
  APEX_HD void operator()(value_type& p, value_type& g, States&... states) const {
    g *= inverse_scale;
    step(p, g, states...);
  }
};

// The step reads and writes a wide master; its rounded value goes to the model's parameter.
template <class Step>
struct WithMaster {
  using value_type = typename Step::value_type;

  Step step;

  template <class... Largest>
  APEX_HD void operator()(value_type& p, value_type& g, value_type& m, value_type& v,
                          value_type& master, Largest&... largest) const {
    step(master, g, m, v, largest...);
    p = master;
  }
};

// What a launch of Adam does beside the step.
enum AdamParts : int {
  kPlainAdam = 0,
  kUnscales = 1,  // gradients, in memory
  kClips = 2,     // gradients, on their way to the step
  kMasters = 4,
  kStochastic = 8,  // rounds parameters by chance
};

// The step whose numbers may live on the device, so that a captured graph can be replayed. S: how
// gradients are stored.
template <class S, int kParts>
struct AdamLaunch {
  using T = compute_t<S>;
  using value_type = T;

  AdamHyper hyper;
  double sign;  // -1 to maximize

  APEX_HD bool skip() const { return hyper.numbers.skip(); }

  APEX_HD auto prepare() const {
    if constexpr ((kParts & kStochastic) != 0) {
      static_assert((kParts & kMasters) == 0);
      return RoundedTensors<decltype(unscaled())>{unscaled(), hyper.rounding_of_step()};
    } else if constexpr ((kParts & kMasters) != 0) {
      return WithMaster<decltype(unscaled())>{unscaled()};
    } else {
      return unscaled();
    }
  }

 private:
  APEX_HD auto clipped() const {
    AdamStep<T> step = make_adam_step<T>(hyper, sign);
    if constexpr ((kParts & kClips) != 0) {
      return Clipped<S, AdamStep<T>>{step, static_cast<T>(hyper.numbers.clip_factor())};
    } else {
      return step;
    }
  }

  APEX_HD auto unscaled() const {
    if constexpr ((kParts & kUnscales) != 0) {
      const T scale = static_cast<T>(hyper.numbers.gradient_scale());
      return Unscaled<decltype(clipped())>{clipped(), scale};
    } else {
      return clipped();
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
