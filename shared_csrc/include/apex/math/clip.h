// Gradients clipped on their way to a step, as if they had been clipped in memory before.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// x as storage of type S would hold it. float16 by integers: compilers make no vectors of the
// processor's instructions for it.
template <class S, class T>
APEX_HD T round_through(T x) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const float rounded = bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    return x == x ? rounded : x;
  } else if constexpr (std::is_same_v<S, Half>) {
    return half_bits_to_float(float_to_half_bits(x));
  } else {
    return x;
  }
}

// The step with the gradient times `factor`, rounded to its storage type S; the gradient stays.
template <class S, class Step>
struct Clipped {
  using value_type = typename Step::value_type;

  Step step;
  value_type factor;

  template <class... Columns>
  APEX_HD void operator()(value_type& p, value_type& g, Columns&... columns) const {
    value_type clipped = round_through<S>(g * factor);
    step(p, clipped, columns...);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
