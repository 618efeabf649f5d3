// 16-bit storage types, their conversion to compute types, and the compute type of each.
#pragma once

#include <cstring>
#include <type_traits>

#include "apex/core/config.h"

#if defined(APEX_CUDA)
#include <cuda_fp16.h>
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type in which values of storage type S are computed.
template <class S>
using compute_t = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <class To, class From>
APEX_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

APEX_HD float to_float(Half value) {
#if defined(APEX_CUDA)
  return __half2float(bit_cast<__half>(value.bits));
#else
  return static_cast<float>(bit_cast<_Float16>(value.bits));
#endif
}

APEX_HD Half to_half(float value) {
#if defined(APEX_CUDA)
  return {bit_cast<uint16_t>(__float2half_rn(value))};
#else
  return {bit_cast<uint16_t>(static_cast<_Float16>(value))};
#endif
}

APEX_HD float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN, which adding the rounding bias could break.
APEX_HD BFloat16 to_bfloat16(float value) {
  uint32_t bits = bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

// Storage to compute type and back; exact where To holds all values of From.
template <class To, class From>
APEX_HD To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
    return convert<To>(to_float(value));
  } else if constexpr (std::is_same_v<To, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

// A fixed number of values that functors return together, such as two sums of one pass.
template <class T, int N>
struct Array {
  T values[N];
  APEX_HD T& operator[](int i) { return values[i]; }
  APEX_HD const T& operator[](int i) const { return values[i]; }
};

template <class T>
APEX_HD bool is_finite(T value) {
  // inf - inf and nan - nan are nan; unlike isfinite() this stays one vector operation.
  return value - value == T(0);
}

template <class T>
APEX_HD T max_propagating_nan(T a, T b) {
  // A NaN in either argument wins, as in torch.amax.
  return (a > b || a != a) ? a : b;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
