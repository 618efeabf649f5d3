// Weight and bias of a normalization, either of which may be absent, and how their effect is
// undone.
#pragma once

#include <cmath>
#include <limits>

#include "apex/core/types.h"

// Row programs here are large: on the CPU one body serves both engines that call it.
#if defined(APEX_GPU)
#define APEX_NORM_ROW APEX_HD
#else
#define APEX_NORM_ROW __attribute__((noinline))
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

// A value, or a constant in its place. Chosen by masks: from a condition, compilers make two loops.
template <class T>
struct ValueOr {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  Bits mask, constant;

  ValueOr(bool has_value, T otherwise)
      : mask(has_value ? ~Bits(0) : 0), constant(has_value ? 0 : bit_cast<Bits>(otherwise)) {}

  APEX_HD T operator()(T value) const {
    return bit_cast<T>(static_cast<Bits>((bit_cast<Bits>(value) & mask) | constant));
  }
};

// What is absent points to memory that may be read and does not count, so that one loop serves all
// cases.
template <class W, class T>
struct Affine {
  const W* weight;  // [columns]
  const W* bias;    // [columns]
  ValueOr<T> weight_or_one, bias_or_zero;

  // y = xhat * w + b solved for xhat. Weights below `smallest` are enlarged to it: what a zero
  // weight has erased is gone, but nothing becomes infinite.
  APEX_HD T undo(T y, T w, T b, T smallest) const {
    T magnitude = std::fabs(weight_or_one(w));
    T divisor = std::copysign(magnitude < smallest ? smallest : magnitude, weight_or_one(w));
    return (y - bias_or_zero(b)) / divisor;
  }
};

template <class T>
T smallest_divisor(double eps) {
  return static_cast<T>(eps) > std::numeric_limits<T>::min() ? static_cast<T>(eps)
                                                             : std::numeric_limits<T>::min();
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
