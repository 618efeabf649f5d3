// Adam whose state takes less memory: moments in 16 or 8 bits and float16 masters with a scale per
// tensor, and float32 masters split into a bfloat16 parameter and 16 bits of remainder.
//
// Scales: Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861), with one block per tensor.
#pragma once

#include "apex/math/adam.h"
#include "apex/math/clip.h"
#include "apex/math/remainder.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// Factors between the states of one tensor and what is stored of them; powers of two, so that they
// round nothing.
struct StateScales {
  float m = 1, v = 1, master = 1;

  // Those of row `tensor` of [tensors, 3], or 1 where there are none.
  APEX_HD static StateScales of(const float* scales, int64_t tensor) {
    if (scales == nullptr) return {};
    const float* own = scales + 3 * tensor;
    return {own[0], own[1], own[2]};
  }

  APEX_HD StateScales inverse() const { return {1 / m, 1 / v, 1 / master}; }
};

// The plain step, with numbers of one tensor around it.
struct CompactStep {
  using value_type = float;

  AdamStep<float> step;
  StateScales read,
      write;  // what is stored times `read` is the state, which times `write` is stored

  APEX_HD void operator()(float& p, float& g, float& m, float& v) const {
    m *= read.m;
    v *= read.v;
    step(p, g, m, v);
    m *= write.m;
    v *= write.v;
  }
};

// The largest magnitudes that the moments will have, before they are stored.
struct MomentPeaks {
  using value_type = float;

  Moments<float> moments;
  float l2_decay, gradient_scale;
  StateScales read;

  APEX_HD void operator()(double (&peaks)[2], float& g, float& m, float& v) const {
    float none = 0;
    (*this)(peaks, none, g, m, v);
  }

  APEX_HD void operator()(double (&peaks)[2], float& p, float& g, float& m, float& v) const {
    float next1 = m * read.m, next2 = v * read.v;
    moments.update(add_decay(gradient_scale * g, l2_decay, p), next1, next2);
    // inf and NaN are stored as such; they must not take the others' scale.
    peaks[0] = is_finite(next1) ? std::fabs(next1) : 0.0f;
    peaks[1] = is_finite(next2) ? next2 : 0.0f;
  }

  APEX_HD static double combine(double a, double b) { return a > b ? a : b; }
};

// The same of a float16 master, too.
struct MasterPeaks {
  using value_type = float;

  AdamStep<float> step;
  StateScales read;

  APEX_HD void operator()(double (&peaks)[3], float& g, float& m, float& v, float& master) const {
    float next1 = m * read.m, next2 = v * read.v, next = master * read.master;
    step(next, g, next1, next2);
    peaks[0] = is_finite(next1) ? std::fabs(next1) : 0.0f;
    peaks[1] = is_finite(next2) ? next2 : 0.0f;
    peaks[2] = is_finite(next) ? std::fabs(next) : 0.0f;
  }

  APEX_HD static double combine(double a, double b) { return a > b ? a : b; }
};

// A functor with the scales of each tensor; null where states are stored as they are.
template <class Functor>
struct WithScales {
  Functor functor;
  const float* scales;
  const float* new_scales;  // null where nothing is stored

  APEX_HD Functor for_tensor(int64_t tensor) const {
    Functor own = functor;
    auto& factors = inner(own);
    factors.read = StateScales::of(scales, tensor);
    if constexpr (requires { factors.write; }) {
      factors.write = StateScales::of(new_scales, tensor).inverse();
    }
    return own;
  }

 private:
  template <class F>
  APEX_HD static auto& inner(F& own) {
    if constexpr (requires { own.step.read; }) {
      return own.step;
    } else {
      return own;
    }
  }
};

// The master is a float16, and the parameter what is stored of it, rounded: so a parameter can
// always be compared with its master.
struct WithHalfMaster {
  using value_type = float;

  CompactStep step;

  APEX_HD void operator()(float& p, float& g, float& m, float& v, float& master) const {
    float whole = master * step.read.master;
    step(whole, g, m, v);
    master = round_through<Half>(whole * step.write.master);
    p = master * (1 / step.write.master);
  }
};

// The float32 master is the bfloat16 parameter and `remainder`.
struct WithRemainder {
  using value_type = float;

  CompactStep step;

  APEX_HD void operator()(float& p, float& g, float& m, float& v, float& remainder) const {
    float master = join_remainder(p, remainder);
    step(master, g, m, v);
    split_remainder(master, p, remainder);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
