// LAMB: Adam's update, scaled per tensor by the ratio of the norms of parameter and update.
//
// You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962), after the gradients of all
// tensors together were clipped to a norm. A step takes two passes: the first updates the moments
// and adds up the squares of parameter and update, the second computes the update again from the
// moments and takes it. Beside the norm of gradients that moves 40 bytes per float32 element and
// needs no memory for the update. Where moments are stored in fewer bits than they are computed in,
// the second pass would see others than the first (a second moment in float16 may round to 0); then
// it starts from the gradient and is the one that stores them.
#pragma once

#include <cmath>
#include <limits>

#include "apex/math/adam.h"
#include "apex/math/with_copy.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The numbers of a step before they are rounded to the compute type.
struct LambHyper : AdamHyper {
  bool use_nvlamb = false, maximize = false;
  // Of all gradients as they are given, in either type; both null: no clipping.
  const float* global_grad_norm = nullptr;
  const double* global_grad_norm_wide = nullptr;
  double max_grad_norm = 0;                     // 0 or infinite: no clipping
  const float* device_max_grad_norm = nullptr;  // not null: read instead

  // What gradients are multiplied by: sign, inverse loss scale and clipping. As in
  // torch.nn.utils.clip_grad_norm_ a norm of inf makes finite gradients 0 and infinite ones NaN,
  // and a norm of NaN makes all of them NaN: hence not `norm > limit`.
  APEX_HD double gradient_factor() const {
    double factor = (maximize ? -1 : 1) * numbers.gradient_scale();
    double norm = 0, limit = max_grad_norm;
    if (global_grad_norm != nullptr) norm = *global_grad_norm;
    if (global_grad_norm_wide != nullptr) norm = *global_grad_norm_wide;
    if (device_max_grad_norm != nullptr) limit = *device_max_grad_norm;
    bool clips = limit > 0 && limit <= std::numeric_limits<double>::max() && !(norm <= limit);
    return clips ? factor * (limit / norm) : factor;
  }
};

// Adam's update, which is also squared for its norm.
template <class T>
struct LambMoments : AdamUpdate<T> {
  using AdamUpdate<T>::operator();

  APEX_HD void operator()(double (&squares)[2], T& p, T& g, T& m, T& v) const {
    double update = (*this)(p, g, m, v), param = p;
    squares[0] = param * param;
    squares[1] = update * update;
  }
};

template <class T>
APEX_HD LambMoments<T> make_lamb_moments(const LambHyper& hyper) {
  return {make_update<T>(hyper, hyper.gradient_factor())};
}

// The same in two operators, between which the caller takes norms: first the update of one tensor.
template <class T>
struct StageOneStep {
  using value_type = T;

  LambMoments<T> moments;

  APEX_HD void operator()(T& g, T& p, T& m, T& v, T& update) const { update = moments(p, g, m, v); }
};

// Then p -= rate * update.
template <class T>
struct StageTwoStep {
  using value_type = T;

  T rate;

  APEX_HD void operator()(T& p, T& update) const { p -= rate * update; }
};

template <class T>
struct LambFirstPass {
  using value_type = T;

  LambHyper hyper;

  APEX_HD bool skip() const { return hyper.numbers.skip(); }
  APEX_HD LambMoments<T> prepare() const { return make_lamb_moments<T>(hyper); }
};

// The learning rate of a tensor, from the squares of its parameter's and its update's norm.
APEX_HD double trusted_rate(double lr, bool adapts, double param_square, double update_square) {
  return adapts && has_ratio(param_square) && update_square != 0
             ? lr * std::sqrt(param_square / update_square)
             : lr;
}

// Second pass, for one tensor. The direction comes from the moments, or, with LambMoments, from the
// gradient and the moments of the step before.
template <class T, class Direction>
struct LambUpdate {
  using value_type = T;

  T rate;
  Direction direction;

  template <class... Columns>
  APEX_HD void operator()(T& p, Columns&... columns) const {
    p -= rate * direction(p, columns...);
  }
};

template <class T, class Direction, Results kResults>
struct LambTensors {
  double lr;
  bool adapts;
  const double* squares;  // [tensors, 2], from the first pass
  Direction direction;

  APEX_HD auto for_tensor(int64_t tensor) const {
    const double* own = squares + 2 * tensor;
    LambUpdate<T, Direction> update{static_cast<T>(trusted_rate(lr, adapts, own[0], own[1])),
                                    direction};
    if constexpr (kResults == Results::kCopy) {
      return WithCopy<LambUpdate<T, Direction>>{update};
    } else {
      return update;
    }
  }
};

// kMoments: whether this pass, not the first, updates the moments.
template <class T, bool kMoments, Results kResults>
struct LambSecondPass {
  LambHyper hyper;
  const double* squares;  // [tensors, 2]

  APEX_HD bool skip() const { return hyper.numbers.skip(); }
  APEX_HD auto prepare() const {
    if constexpr (kResults == Results::kStochasticRounding) {
      return RoundedTensors<decltype(tensors())>{tensors(), hyper.rounding_of_step()};
    } else {
      return tensors();
    }
  }

 private:
  APEX_HD auto tensors() const {
    double lr = hyper.numbers.learning_rate();
    bool adapts = hyper.use_nvlamb || hyper.weight_decay != 0;
    if constexpr (kMoments) {
      return LambTensors<T, LambMoments<T>, kResults>{lr, adapts, squares,
                                                      make_lamb_moments<T>(hyper)};
    } else {
      return LambTensors<T, AdamDirection<T>, kResults>{lr, adapts, squares,
                                                        make_direction<T>(hyper)};
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
