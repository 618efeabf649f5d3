// A scaled copy, and the sum of squares of what was copied, one element at a time.
#pragma once

#include "apex/core/types.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {

template <class T>
struct ScaleSquares {
  using value_type = T;

  T scale;

  APEX_HD void operator()(double (&squares)[1], T& in, T& out) const {
    out = in * scale;
    squares[0] = static_cast<double>(in) * static_cast<double>(in);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
