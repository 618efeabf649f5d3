// What an infinite parameter takes part in: weight decay, and ratios of norms.
#pragma once

#include <cmath>
#include <limits>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// sum + weight_decay * p. A decay of 0 adds nothing, as in torch.optim: 0 times an infinite
// parameter would be NaN. Without a branch on values, so that compilers vectorize it.
//
// Where `sum` is a product, too, a compiler may fuse the addition with either: kernels of one
// formula would differ in the last bit.
template <class T>
APEX_HD T add_decay(T sum, T weight_decay, T p) {
  return weight_decay != T(0) ? multiply_add(weight_decay, p, sum) : sum;
}

// Whether a step adapts to a parameter of this norm, or square of a norm. It does not where that is
// 0, or infinite, which would make the learning rate infinite. NaN passes, and so reaches all of
// the tensor.
template <class T>
APEX_HD bool has_ratio(T param_norm) {
  return param_norm != T(0) && !(param_norm > std::numeric_limits<T>::max());
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
