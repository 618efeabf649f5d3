// Weight and bias of a normalization, either of which may be absent, and how their effect is
// undone. A zero-centred weight is stored as its difference from 1.
#pragma once

#include <cmath>
#include <limits>

#include "apex/core/types.h"
#include "apex/math/quotient.h"

// Row programs here are large: on the CPU one body serves both engines that call it.
#if defined(APEX_GPU)
#define APEX_NORM_ROW APEX_HD
#else
#define APEX_NORM_ROW __attribute__((noinline))
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// A value, or a constant in its place. Chosen by masks: from a condition, compilers make two loops.
template <class T>
struct ValueOr {
  using Bits = BitsOf<T>;
  Bits mask, constant;

  ValueOr(bool has_value, T otherwise)
      : mask(has_value ? ~Bits(0) : 0), constant(has_value ? 0 : bit_cast<Bits>(otherwise)) {}

  APEX_HD T operator()(T value) const {
    return bit_cast<T>(static_cast<Bits>((bit_cast<Bits>(value) & mask) | constant));
  }
};

// What a normalized number is multiplied by: the weight, 1 + weight if that is zero-centred, or 1
// without one. The sum has the precision of T, whatever the weight is stored as.
template <class T>
struct Scale {
  using Bits = BitsOf<T>;
  Bits mask;
  T origin;

  // -0 changes no number that it is added to.
  Scale(bool has_weight, bool zero_centered)
      : mask(has_weight ? ~Bits(0) : 0), origin(has_weight && !zero_centered ? T(-0.0) : T(1)) {}

  APEX_HD T operator()(T weight) const {
    return bit_cast<T>(static_cast<Bits>(bit_cast<Bits>(weight) & mask)) + origin;
  }
};

// What is absent points to memory that may be read and does not count, so that one loop serves all
// cases.
template <class W, class T>
struct Affine {
  const W* weight;  // [columns]
  const W* bias;    // [columns]
  Scale<T> scale;
  ValueOr<T> bias_or_zero;

  // y = xhat * scale(w) + b solved for xhat. Scales below `smallest` are enlarged to it: what a
  // zero weight has erased is gone, but nothing becomes infinite.
  APEX_HD T undo(T y, T w, T b, T smallest) const {
    T magnitude = std::fabs(scale(w));
    T divisor = std::copysign(magnitude < smallest ? smallest : magnitude, scale(w));
    return quotient(y - bias_or_zero(b), divisor);
  }
};

template <class T>
T smallest_divisor(double eps) {
  return static_cast<T>(eps) > std::numeric_limits<T>::min() ? static_cast<T>(eps)
                                                             : std::numeric_limits<T>::min();
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
