// Adam as Apex's first optimizer has it: the bias correction is part of the learning rate, and the
// epsilon may stand inside the root; a step can be undone.
//
// Kingma & Ba 2015, section 2, the more efficient order of computation
// (https://arxiv.org/abs/1412.6980).
#pragma once

#include "apex/math/adam.h"

namespace apex::legacy_adam {
inline namespace APEX_BACKEND_NS {

// The numbers of a step before they are rounded to the compute type.
struct LegacyHyper {
  double rate;  // with the bias correction
  double beta1, beta2, eps, weight_decay, grad_scale;
  bool eps_inside_sqrt;
  const float* device_scale;  // not null: read instead of grad_scale
  int* overflow;              // not null: elements without a finite gradient are left out
  const int* flag;            // may be null

  template <class T>
  APEX_HD Moments<T> moments() const {
    return make_moments<T>(beta1, beta2);
  }
  template <class T>
  APEX_HD AdamDirection<T> direction(double decay) const {
    return {T(1), T(1), static_cast<T>(eps_inside_sqrt ? 0 : eps), static_cast<T>(decay)};
  }
  APEX_HD double inner_eps() const { return eps_inside_sqrt ? eps : 0; }
  APEX_HD double gradient_factor() const {
    return 1 / (device_scale != nullptr ? static_cast<double>(*device_scale) : grad_scale);
  }
};

template <class T>
struct ScaledAdam {
  using value_type = T;

  T gradient_factor, inner_eps, rate;
  Moments<T> moments;
  AdamDirection<T> direction;
  int* flag;  // null: all elements are stepped

  // Returns 1 for an element that is left out. Without a branch on values.
  APEX_HD int operator()(T& p, T& g, T& m, T& v) const {
    T new_m = m, new_v = v;
    moments.update(gradient_factor * g, new_m, new_v);
    T new_p = p - rate * direction(p, new_m, new_v + inner_eps);
    int is_left_out = static_cast<int>(flag != nullptr) & static_cast<int>(!is_finite(g));
    p = is_left_out ? p : new_p;
    m = is_left_out ? m : new_m;
    v = is_left_out ? v : new_v;
    return is_left_out;
  }

  APEX_HD int operator()(T& p, T& g, T& m, T& v, T& copy) const {
    int is_left_out = (*this)(p, g, m, v);
    copy = p;
    return is_left_out;
  }
};

// Nothing is done where the flag is set.
template <class T>
struct ScaledAdamLaunch {
  using value_type = T;

  LegacyHyper hyper;

  APEX_HD bool skip() const { return hyper.flag != nullptr && *hyper.flag != 0; }
  APEX_HD ScaledAdam<T> prepare() const {
    return {static_cast<T>(hyper.gradient_factor()),
            static_cast<T>(hyper.inner_eps()),
            static_cast<T>(hyper.rate),
            hyper.moments<T>(),
            hyper.direction<T>(hyper.weight_decay),
            hyper.overflow};
  }
};

// The step backwards: from p' = p - rate * (m / root + decay * p), and the moments of m and v.
template <class T>
struct AdamUndo {
  using value_type = T;

  T gradient_factor, inner_eps, rate;
  Moments<T> moments;
  AdamDirection<T> direction;  // without decay
  T growth;                    // 1 / (1 - rate * decay)
  T inverse_beta1, inverse_beta2;

  APEX_HD void operator()(T& p, T& g, T& m, T& v) const {
    T gradient = gradient_factor * g;
    T old_p = (p + rate * direction(p, m, v + inner_eps)) * growth;
    T old_m = (m - moments.alpha1 * gradient) * inverse_beta1;
    T old_v = (v - moments.alpha2 * gradient * gradient) * inverse_beta2;
    old_v = old_v < T(0) ? T(0) : old_v;  // rounding
    bool was_left_out = !is_finite(g);
    p = was_left_out ? p : old_p;
    m = was_left_out ? m : old_m;
    v = was_left_out ? v : old_v;
  }
};

// Nothing is done unless the flag is set.
template <class T>
struct AdamUndoLaunch {
  using value_type = T;

  LegacyHyper hyper;

  APEX_HD bool skip() const { return *hyper.flag == 0; }
  APEX_HD AdamUndo<T> prepare() const {
    return {static_cast<T>(hyper.gradient_factor()),
            static_cast<T>(hyper.inner_eps()),
            static_cast<T>(hyper.rate),
            hyper.moments<T>(),
            hyper.direction<T>(0),
            static_cast<T>(1 / (1 - hyper.rate * hyper.weight_decay)),
            static_cast<T>(1 / hyper.beta1),
            static_cast<T>(1 / hyper.beta2)};
  }
};

// y = x; nothing is done where the flag is set.
struct CastUnless {
  using value_type = float;

  const int* flag;

  APEX_HD bool skip() const { return *flag != 0; }
  APEX_HD void operator()(float& x, float& y) const { y = x; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::legacy_adam
