// LAMB's two stages with numbers per tensor that live on the device, for parameters of which every
// process has a part.
//
// You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).
#pragma once

#include "apex/math/lamb.h"

namespace apex::sharded_lamb {
inline namespace APEX_BACKEND_NS {

inline constexpr int kNumbers = 8;  // per tensor, see TermTensors

struct TermTensors {
  // [tensors, 8]: beta1, beta2, the weights of a gradient and of its square, the inverses of both
  // bias corrections, eps, weight decay.
  const double* numbers;
  double gradient_factor;
  bool decoupled;

  APEX_HD StageOneStep<float> for_tensor(int64_t tensor) const {
    float own[kNumbers];
    for (int i = 0; i < kNumbers; ++i) own[i] = static_cast<float>(numbers[kNumbers * tensor + i]);
    LambMoments<float> moments;
    moments.gradient_factor = static_cast<float>(gradient_factor);
    moments.l2_decay = decoupled ? 0 : own[7];
    moments.moments = {own[0], own[1], own[2], own[3]};
    moments.direction = {own[4], own[5], own[6], decoupled ? own[7] : 0};
    return {moments};
  }
};

// The update; nothing is done where the flag is set.
struct LambTerms {
  const double* numbers;
  const double* gradient_factor;
  const int* noop_flag;
  bool decoupled;

  APEX_HD bool skip() const { return *noop_flag != 0; }
  APEX_HD TermTensors prepare() const { return {numbers, *gradient_factor, decoupled}; }
};

// What the update of one tensor is multiplied by.
struct RateTensors {
  double lr;
  const double* param_norms;   // [tensors]
  const double* update_norms;  // [tensors]
  const double* decays;        // [tensors]
  bool use_nvlamb;

  APEX_HD auto for_tensor(int64_t tensor) const {
    double param = param_norms[tensor], update = update_norms[tensor];
    bool adapts = use_nvlamb || decays[tensor] != 0;
    double rate = trusted_rate(lr, adapts, param * param, update * update);
    return WithCopy<StageTwoStep<float>>{{static_cast<float>(rate)}};
  }
};

// Takes the update; nothing is done where the flag is set.
struct LambRates {
  const float* lr;
  const double *param_norms, *update_norms, *decays;
  const int* noop_flag;
  bool use_nvlamb;

  APEX_HD bool skip() const { return *noop_flag != 0; }
  APEX_HD RateTensors prepare() const {
    return {*lr, param_norms, update_norms, decays, use_nvlamb};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::sharded_lamb
