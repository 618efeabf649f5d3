// NovoGrad: a running norm of the gradient per tensor, and with it a step, one element at a time.
//
// Ginsburg et al. 2019, algorithm 1 (https://arxiv.org/abs/1905.11286), with the norm itself where
// the paper keeps its square, and with bias correction.
#pragma once

#include <cmath>

#include "apex/core/step_numbers.h"
#include "apex/math/decay.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// The running norm of one tensor takes in the norm of its gradient.
struct BlendNorms {
  using value_type = double;

  double beta2;
  bool is_max_norm;  // blends the norms themselves, not their squares
  bool first_run;    // the running norm is not read: it becomes the gradient's norm
  double scale;      // of the gradient, whose norm is taken before it is scaled

  APEX_HD void operator()(double& norm, double& grad_norm) const {
    double alpha2 = 1 - beta2, other = scale * grad_norm;
    double blended = is_max_norm ? beta2 * norm + alpha2 * other
                                 : std::sqrt(beta2 * norm * norm + alpha2 * other * other);
    norm = first_run ? other : blended;
  }
};

// kInside: gradient and decay are normalized and regularized before the moment takes them in.
template <class T, bool kInside>
struct NovoGradStep {
  using value_type = T;

  T lr, beta1, weight_decay;
  T alpha1;               // 1 - beta1, or 1 without averaging; in double by the caller
  T inverse_correction1;  // 1 / (1 - beta1^t), or 1 without bias correction
  T factor;               // of the gradient: its scale, negative to maximize
  T denominator;          // of this tensor

  APEX_HD void operator()(T& p, T& g, T& m) const {
    T gradient = factor * g;
    if constexpr (kInside) {
      m = beta1 * m + alpha1 * add_decay(gradient / denominator, weight_decay, p);
      p -= lr * (m * inverse_correction1);
    } else {
      m = beta1 * m + alpha1 * gradient;
      p -= lr * add_decay((m * inverse_correction1) / denominator, weight_decay, p);
    }
  }
};

// The steps of all tensors, whose running norms are norms[i], of type N.
template <class T, class N, bool kInside>
struct NovoGradTensors {
  NovoGradStep<T, kInside> step;  // without its denominator
  T eps;
  T inverse_correction2;  // 1 / sqrt(1 - beta2^t), or 1 without bias correction
  const N* norms;         // [tensors]

  APEX_HD NovoGradStep<T, kInside> for_tensor(int64_t tensor) const {
    NovoGradStep<T, kInside> own = step;
    own.denominator = static_cast<T>(norms[tensor]) * inverse_correction2 + eps;
    return own;
  }
};

// The numbers of a step before they are rounded to the compute type.
struct NovoGradHyper {
  double beta1, beta2, eps, weight_decay;
  bool grad_averaging, is_max_norm, maximize;
  bool first_run;  // whether a first step does not read the running norms
  StepNumbers numbers;

  // The host tells first_run of the step it knows.
  APEX_HD bool is_first() const {
    return first_run && (numbers.device_step == nullptr || *numbers.device_step == 1);
  }
};

struct BlendAllNorms {
  using value_type = double;

  NovoGradHyper hyper;

  APEX_HD bool skip() const { return hyper.numbers.skip(); }
  APEX_HD BlendNorms prepare() const {
    return {hyper.beta2, hyper.is_max_norm, hyper.is_first(), hyper.numbers.gradient_scale()};
  }
};

template <class T, class N, bool kInside>
struct NovoGradSteps {
  using value_type = T;

  NovoGradHyper hyper;
  const N* norms;  // [tensors]

  APEX_HD bool skip() const { return hyper.numbers.skip(); }
  APEX_HD NovoGradTensors<T, N, kInside> prepare() const {
    const StepNumbers& numbers = hyper.numbers;
    double correction1 = numbers.correction(hyper.beta1, numbers.correction1);
    double correction2 = numbers.correction(hyper.beta2, numbers.correction2);
    double factor = (hyper.maximize ? -1 : 1) * numbers.gradient_scale();
    NovoGradStep<T, kInside> step{static_cast<T>(numbers.learning_rate()),
                                  static_cast<T>(hyper.beta1),
                                  static_cast<T>(hyper.weight_decay),
                                  static_cast<T>(hyper.grad_averaging ? 1 - hyper.beta1 : 1),
                                  static_cast<T>(1 / correction1),
                                  static_cast<T>(factor),
                                  T(1)};
    return {step, static_cast<T>(hyper.eps), static_cast<T>(1 / std::sqrt(correction2)), norms};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
