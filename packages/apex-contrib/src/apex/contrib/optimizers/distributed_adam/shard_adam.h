// Adam on fragments of sharded parameters: a scale for gradients that is on the device, a copy of
// the new parameter for the other ranks, remainders of bfloat16 parameters, and states with a scale
// per fragment.
//
// Rajbhandari et al. 2020, stage 2 (https://arxiv.org/abs/1910.02054).
#pragma once

#include "apex/math/adam.h"
#include "apex/math/remainder.h"

namespace apex::distributed_adam {
inline namespace APEX_BACKEND_NS {

// Factors between a state and what is stored of it; powers of two, so that they round nothing.
struct StateScales {
  float p = 1, m = 1, v = 1;
};

// The step of one fragment.
struct FragmentStep {
  using value_type = float;

  AdamStep<float> step;
  StateScales read, write;

  // States as they are, not as they are stored.
  APEX_HD void advance(float& p, float& g, float& m, float& v) const {
    p *= read.p;
    m *= read.m;
    v *= read.v;
    step(p, g, m, v);
  }

  APEX_HD void operator()(float& p, float& g, float& m, float& v) const {
    advance(p, g, m, v);
    p *= write.p;
    m *= write.m;
    v *= write.v;
  }

  APEX_HD void operator()(float& p, float& g, float& m, float& v, float& copy) const {
    advance(p, g, m, v);
    copy = p;
    p *= write.p;
    m *= write.m;
    v *= write.v;
  }

  // `p` and `copy` are bfloat16.
  APEX_HD void operator()(float& p, float& g, float& m, float& v, float& remainder,
                          float& copy) const {
    float master = join_remainder(p, remainder);
    step(master, g, m, v);
    split_remainder(master, p, remainder);
    copy = p;
  }
};

// The largest magnitudes that the states of a fragment will have, before they are stored.
struct FragmentPeaks {
  using value_type = float;

  FragmentStep step;

  APEX_HD void operator()(double (&peaks)[3], float& p, float& g, float& m, float& v) const {
    step.advance(p, g, m, v);
    // inf and NaN are stored as such; they must not take the others' scale.
    peaks[0] = is_finite(p) ? std::fabs(p) : 0.0f;
    peaks[1] = is_finite(m) ? std::fabs(m) : 0.0f;
    peaks[2] = is_finite(v) ? v : 0.0f;
  }

  APEX_HD static double combine(double a, double b) { return a > b ? a : b; }
};

// The step with the scales of each fragment, [fragments, 3]; null where states are stored as they
// are.
template <class Functor>
struct OfFragments {
  using value_type = float;

  FragmentStep plain;
  const float* scales;
  const float* new_scales;

  APEX_HD Functor for_tensor(int64_t fragment) const {
    FragmentStep own = plain;
    if (scales != nullptr) {
      const float* read = scales + 3 * fragment;
      own.read = {read[0], read[1], read[2]};
    }
    if (new_scales != nullptr) {
      const float* write = new_scales + 3 * fragment;
      own.write = {1 / write[0], 1 / write[1], 1 / write[2]};
    }
    return {own};
  }
};

// The same before the numbers on the device are read.
template <class Functor>
struct ShardAdam {
  using value_type = float;

  AdamHyper hyper;
  const float* scales;
  const float* new_scales;

  APEX_HD bool skip() const { return hyper.numbers.skip(); }

  APEX_HD OfFragments<Functor> prepare() const {
    return {
        {make_adam_step<float>(hyper, hyper.numbers.gradient_scale()), {}, {}}, scales, new_scales};
  }
};

// The same where all is float32 and without scales: columns that need no conversion take half the
// time, and the numbers are those of FusedAdam, bit for bit.
struct WideAdam {
  using value_type = float;

  AdamHyper hyper;

  APEX_HD bool skip() const { return hyper.numbers.skip(); }
  APEX_HD AdamStep<float> prepare() const {
    return make_adam_step<float>(hyper, hyper.numbers.gradient_scale());
  }
};

struct WideStepWithCopy {
  using value_type = float;

  AdamStep<float> step;

  APEX_HD void operator()(float& p, float& g, float& m, float& v, float& copy) const {
    step(p, g, m, v);
    copy = p;
  }
};

struct WideAdamWithCopy : WideAdam {
  APEX_HD WideStepWithCopy prepare() const { return {WideAdam::prepare()}; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::distributed_adam
