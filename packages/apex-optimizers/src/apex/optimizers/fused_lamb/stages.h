// LAMB in two operators, between which the caller takes norms: the update, and its application.
//
// You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962); every tensor has a decay of its
// own.
#pragma once

#include "apex/math/lamb.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

template <class T>
struct StageOneTensors {
  LambMoments<T> moments;
  const float* decays;  // [tensors]

  APEX_HD StageOneStep<T> for_tensor(int64_t tensor) const {
    LambMoments<T> own = moments;
    own.direction.decay = static_cast<T>(decays[tensor]);
    return {own};
  }
};

template <class T>
struct StageOne {
  LambHyper hyper;  // its weight_decay is not used
  const float* decays;

  APEX_HD StageOneTensors<T> prepare() const { return {make_lamb_moments<T>(hyper), decays}; }
};

template <class T>
struct StageTwo {
  double lr;
  bool adapts;
  const double* param_norms;   // [tensors]
  const double* update_norms;  // [tensors]

  APEX_HD StageTwoStep<T> for_tensor(int64_t tensor) const {
    double param = param_norms[tensor], update = update_norms[tensor];
    return {static_cast<T>(adapts && has_ratio(param) && update != 0 ? lr * (param / update) : lr)};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
