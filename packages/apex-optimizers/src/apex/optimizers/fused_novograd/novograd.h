// NovoGrad: a running norm of the gradient per tensor, and with it a step, one element at a time.
//
// Ginsburg et al. 2019, algorithm 1 (https://arxiv.org/abs/1905.11286), with the norm itself where
// the paper keeps its square, and with bias correction.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// The running norm of one tensor takes in the norm of its gradient.
struct BlendNorms {
  using value_type = double;

  double beta2;
  bool is_max_norm;  // blends the norms themselves, not their squares
  bool first_run;    // the running norm is not read: it becomes the gradient's norm

  APEX_HD void operator()(double& norm, double& grad_norm) const {
    double alpha2 = 1 - beta2;
    double blended = is_max_norm ? beta2 * norm + alpha2 * grad_norm
                                 : std::sqrt(beta2 * norm * norm + alpha2 * grad_norm * grad_norm);
    norm = first_run ? grad_norm : blended;
  }
};

// kInside: gradient and decay are normalized and regularized before the moment takes them in.
template <class T, bool kInside>
struct NovoGradStep {
  using value_type = T;

  T lr, beta1, weight_decay;
  T alpha1;               // 1 - beta1, or 1 without averaging; in double by the caller
  T inverse_correction1;  // 1 / (1 - beta1^t), or 1 without bias correction
  T sign;                 // of the gradient: -1 to maximize
  T denominator;          // of this tensor

  APEX_HD void operator()(T& p, T& g, T& m) const {
    T gradient = sign * g;
    if constexpr (kInside) {
      m = beta1 * m + alpha1 * (gradient / denominator + weight_decay * p);
      p -= lr * (m * inverse_correction1);
    } else {
      m = beta1 * m + alpha1 * gradient;
      p -= lr * ((m * inverse_correction1) / denominator + weight_decay * p);
    }
  }
};

// The step of every tensor, whose running norm is norms[i], of type N.
template <class T, class N, bool kInside>
struct NovoGradSteps {
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
  double lr, beta1, beta2, eps, weight_decay;
  double step;  // 1 for the first
  bool bias_correction, grad_averaging, maximize;
};

template <class T, bool kInside, class N>
NovoGradSteps<T, N, kInside> make_novograd_steps(const NovoGradHyper& hyper, const N* norms) {
  double correction1 = 1, correction2 = 1;
  if (hyper.bias_correction) {
    correction1 = 1 - std::pow(hyper.beta1, hyper.step);
    correction2 = std::sqrt(1 - std::pow(hyper.beta2, hyper.step));
  }
  NovoGradStep<T, kInside> step{static_cast<T>(hyper.lr),
                                static_cast<T>(hyper.beta1),
                                static_cast<T>(hyper.weight_decay),
                                static_cast<T>(hyper.grad_averaging ? 1 - hyper.beta1 : 1),
                                static_cast<T>(1 / correction1),
                                hyper.maximize ? T(-1) : T(1),
                                T(1)};
  return {step, static_cast<T>(hyper.eps), static_cast<T>(1 / correction2), norms};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
