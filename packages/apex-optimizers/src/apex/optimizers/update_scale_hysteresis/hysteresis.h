// A dynamic loss scale that is lowered only after several steps with inf or NaN in a row.
//
// Micikevicius et al. 2018, section 3.2 (https://arxiv.org/abs/1710.03740), with a tolerance.
#pragma once

#include "apex/core/types.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// Counters are whole numbers, which double holds exactly.
struct HysteresisStep {
  using value_type = double;

  double growth_factor, backoff_factor, growth_interval, hysteresis;

  // scale; clean steps since it last changed; bad steps still tolerated; 0 or how bad this step is
  APEX_HD void operator()(double& scale, double& growth, double& tolerance, double& found) const {
    if (found != 0) {  // or NaN
      tolerance -= 1;
      growth = 0;
      if (tolerance > 0) return;
      scale = scale * backoff_factor;
      return;
    }
    growth += 1;
    if (growth == growth_interval) {
      double grown = scale * growth_factor;
      if (is_finite(static_cast<float>(grown))) scale = grown;
      growth = 0;
    }
    tolerance = hysteresis;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
