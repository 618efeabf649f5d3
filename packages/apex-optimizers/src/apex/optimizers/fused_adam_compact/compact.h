// Adam whose state takes less memory: moments in 16 or 8 bits with a scale per tensor, and float32
// masters split into a bfloat16 parameter and 16 bits of remainder.
//
// Scales: Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861), with one block per tensor.
#pragma once

#include "apex/math/adam.h"
#include "apex/math/remainder.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// Factors between a moment and what is stored of it; powers of two, so that they round nothing.
struct MomentScales {
  float read1 = 1, read2 = 1;    // stored value times this is the moment
  float write1 = 1, write2 = 1;  // moment times this is the value to store
};

// The plain step, with numbers of one tensor around it.
struct CompactStep {
  using value_type = float;

  AdamStep<float> step;
  MomentScales scales;

  APEX_HD void operator()(float& p, float& g, float& m, float& v) const {
    m *= scales.read1;
    v *= scales.read2;
    step(p, g, m, v);
    m *= scales.write1;
    v *= scales.write2;
  }
};

// The largest magnitudes that the moments will have, before they are stored.
struct MomentPeaks {
  using value_type = float;

  Moments<float> moments;
  float l2_decay, gradient_scale;
  MomentScales scales;

  APEX_HD void operator()(double (&peaks)[2], float& g, float& m, float& v) const {
    float none = 0;
    (*this)(peaks, none, g, m, v);
  }

  APEX_HD void operator()(double (&peaks)[2], float& p, float& g, float& m, float& v) const {
    float next1 = m * scales.read1, next2 = v * scales.read2;
    moments.update(add_decay(gradient_scale * g, l2_decay, p), next1, next2);
    // inf and NaN are stored as such; they must not take the others' scale.
    peaks[0] = is_finite(next1) ? std::fabs(next1) : 0.0f;
    peaks[1] = is_finite(next2) ? next2 : 0.0f;
  }

  APEX_HD static double combine(double a, double b) { return a > b ? a : b; }
};

// A functor with the scales of each tensor, [tensors, 2]; null where moments are stored as they
// are.
template <class Functor>
struct WithScales {
  Functor functor;
  const float* scales;
  const float* new_scales;  // null where nothing is stored

  APEX_HD Functor for_tensor(int64_t tensor) const {
    Functor own = functor;
    MomentScales& factors = inner(own).scales;
    if (scales != nullptr) {
      factors.read1 = scales[2 * tensor];
      factors.read2 = scales[2 * tensor + 1];
    }
    if (new_scales != nullptr) {
      factors.write1 = 1 / new_scales[2 * tensor];
      factors.write2 = 1 / new_scales[2 * tensor + 1];
    }
    return own;
  }

 private:
  template <class F>
  APEX_HD static auto& inner(F& own) {
    if constexpr (requires { own.step.scales; }) {
      return own.step;
    } else {
      return own;
    }
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
