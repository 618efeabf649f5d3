// Stochastic gradient descent with momentum, one element at a time.
//
// Sutskever et al. 2013, section 2 (https://proceedings.mlr.press/v28/sutskever13.html), in the
// form of torch.optim.SGD: velocity in gradient units, multiplied by the learning rate of the step.
#pragma once

#include "apex/math/decay.h"
#include "apex/math/stochastic_rounding.h"
#include "apex/math/with_copy.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
struct SgdStep {
  using value_type = T;

  T lr, momentum;
  T decay, late_decay;  // added before momentum and after it; one of them is 0
  T alpha;              // 1 - dampening, computed in double by the caller
  T gradient_scale;     // 1 / loss scale; negative to maximize
  bool nesterov;
  bool first_run;  // the buffer's content is not read: it becomes the gradient

  APEX_HD void operator()(T& p, T& g) const {
    // Without momentum both places for the decay are the same.
    p -= lr * add_decay(gradient_scale * g, decay + late_decay, p);
  }

  APEX_HD void operator()(T& p, T& g, T& buffer) const {
    T gradient = add_decay(gradient_scale * g, decay, p);
    T blended = momentum * buffer + alpha * gradient;
    buffer = first_run ? gradient : blended;
    T update = nesterov ? gradient + momentum * buffer : buffer;
    p -= lr * add_decay(update, late_decay, p);
  }
};

// The numbers of a step before they are rounded to the compute type.
struct SgdHyper {
  double momentum, dampening, weight_decay, gradient_scale;
  bool nesterov, decay_after_momentum, first_run;
};

// A step whose learning rate may live on the device. Nothing happens where *noop_flag is not 0.
template <class T, Results kResults>
struct SgdLaunch {
  using value_type = T;

  SgdHyper hyper;
  double lr;
  const float* device_lr;     // the learning rate if not null
  const int* noop_flag;       // may be null
  RoundingKey rounding = {};  // of kStochasticRounding

  APEX_HD bool skip() const { return noop_flag != nullptr && *noop_flag != 0; }

  APEX_HD auto prepare() const {
    SgdStep<T> step{static_cast<T>(device_lr ? *device_lr : lr),
                    static_cast<T>(hyper.momentum),
                    static_cast<T>(hyper.decay_after_momentum ? 0 : hyper.weight_decay),
                    static_cast<T>(hyper.decay_after_momentum ? hyper.weight_decay : 0),
                    static_cast<T>(1 - hyper.dampening),
                    static_cast<T>(hyper.gradient_scale),
                    hyper.nesterov,
                    hyper.first_run};
    if constexpr (kResults == Results::kCopy) {
      return WithCopy<SgdStep<T>>{step};
    } else if constexpr (kResults == Results::kStochasticRounding) {
      return RoundedTensors<SgdStep<T>>{step, rounding};
    } else {
      return step;
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
