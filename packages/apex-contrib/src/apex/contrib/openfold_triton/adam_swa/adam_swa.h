// Adam on wide parameters of a 16-bit model, with a running average of the parameters, in one pass.
//
// Kingma & Ba 2015, algorithm 1 (https://arxiv.org/abs/1412.6980); Loshchilov & Hutter 2019,
// algorithm 2 (https://arxiv.org/abs/1711.05101); averages: Izmailov et al. 2018, section 3.2
// (https://arxiv.org/abs/1803.05407), with a constant decay instead of 1 / n.
#pragma once

#include "apex/math/adam.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

template <class T>
struct AdamSwaStep {
  using value_type = T;

  AdamStep<T> step;
  T weight;  // of the new parameter in its average

  APEX_HD void operator()(T& p, T& g, T& m, T& v, T& copy, T& average) const {
    step(p, g, m, v);
    copy = p;
    // A weight of 1 begins an average, whatever was there: NaN, say.
    const T moved = multiply_add(weight, p - average, average);
    average = weight == T(1) ? p : moved;
  }
};

template <class T>
struct AdamSwaLaunch {
  using value_type = T;

  AdamHyper hyper;
  double grad_scale;
  double average_weight;

  APEX_HD AdamSwaStep<T> prepare() const {
    return {make_adam_step<T>(hyper, grad_scale * hyper.numbers.clip_factor()),
            static_cast<T>(average_weight)};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
