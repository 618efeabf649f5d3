// Rounding to bfloat16 up or down by chance, so that the mean of many roundings is the exact value:
// parameters then follow updates far below their precision without a float32 master.
//
// Gupta et al. 2015, section 3.1 (https://arxiv.org/abs/1502.02551).
#pragma once

#include "apex/math/philox.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What has a neighbour of x in bfloat16 as its upper half, to be stored as CutBFloat16: the one
// further from 0 with a chance of x's distance to the other. `random` has 16 random bits. Numbers
// of bfloat16, infinity and NaN stay what they are.
APEX_HD float round_stochastically(float x, uint32_t random) {
  const float rounded = bit_cast<float>(bit_cast<uint32_t>(x) + random);
  return x == x ? rounded : bit_cast<float>(0x7fc00000u);
}

// What the random bits of a step depend on, beside an element's index and its tensor's row.
struct RoundingKey {
  uint64_t key = 0;
  uint32_t step = 0;

  APEX_HD RandomHalves of(int64_t tensor) const {
    return {key, step, static_cast<uint32_t>(tensor)};
  }
};

// A step that leaves its first column, the parameter, a CutBFloat16, rounded stochastically.
template <class Step>
struct StochasticallyRounded {
  using value_type = float;

  Step step;
  RandomHalves halves;

  APEX_HD const RandomHalves& generator() const { return halves; }

  template <class... Columns>
  APEX_HD void operator()(uint16_t random, float& p, Columns&... columns) const {
    step(p, columns...);
    p = round_stochastically(p, random);
  }
};

// The same before the engine knows the tensor.
template <class Steps>
struct RoundedTensors {
  Steps steps;
  RoundingKey rounding;

  APEX_HD auto for_tensor(int64_t tensor) const {
    if constexpr (requires { steps.for_tensor(tensor); }) {
      using Step = decltype(steps.for_tensor(tensor));
      return StochasticallyRounded<Step>{steps.for_tensor(tensor), rounding.of(tensor)};
    } else {
      return StochasticallyRounded<Steps>{steps, rounding.of(tensor)};
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
