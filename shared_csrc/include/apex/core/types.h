// 16-bit and 8-bit storage types, their conversion to compute types, and the compute type of each.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "apex/core/config.h"

#if defined(__CUDACC__)
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
// The same, but what is stored is cut off instead of rounded: the upper half of a float.
struct CutBFloat16 {
  uint16_t bits;
};
// 4 bits of exponent, 3 of mantissa, no infinity: 2^-9 to 448 (https://arxiv.org/abs/2209.05433).
struct Float8 {
  uint8_t bits;
};

// The upper byte of a float16: 5 bits of exponent, 2 of mantissa. The rest is cut off, not rounded.
struct HighByte {
  uint8_t bits;
};

// The one of two storage types whose packs of 16 bytes have more elements.
template <class A, class B>
using Narrower = std::conditional_t<(sizeof(A) <= sizeof(B)), A, B>;

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

// float16 by integer arithmetic: for compilers without _Float16 (GCC 11, clang 14), and for x86-64
// below v3, where _Float16 is a call of a library per number. Without branches on values, so that
// compilers vectorize it; results are those of the processor's instructions, NaNs included.
APEX_HD float half_bits_to_float(uint16_t half) {
  uint32_t magnitude = half & 0x7fffu;
  float normal = bit_cast<float>((magnitude << 13) + (112u << 23));
  float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  uint32_t bits = bit_cast<uint32_t>(magnitude < 0x400u ? subnormal : normal);
  uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude << 13) | quiet;
  return bit_cast<float>(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// Round to nearest even; from 65520 on that is infinity.
APEX_HD uint16_t float_to_half_bits(float value) {
  uint32_t bits = bit_cast<uint32_t>(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  float magnitude = bit_cast<float>(bits);
  uint32_t normal = ((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13) - (112u << 10);
  // Adding 0.5 leaves the number of steps of 2^-24, rounded, in the lowest bits.
  uint32_t subnormal = bit_cast<uint32_t>(magnitude + 0.5f) & 0x7ffu;
  uint32_t code = magnitude < 0x1p-14f ? subnormal : normal;
  if (bits >= 0x477ff000u) code = 0x7c00u;
  if (bits > 0x7f800000u) code = 0x7e00u | ((bits >> 13) & 0x3ffu);
  return static_cast<uint16_t>(sign | code);
}

// The compiler's type, where it converts by instructions. On arm64 that is __fp16 for all of them:
// g++ 12 has _Float16 there in C alone.
#if defined(APEX_HIP) || (defined(__FLT16_MANT_DIG__) && defined(__F16C__))
#define APEX_FLOAT16 _Float16
#elif defined(__aarch64__)
#define APEX_FLOAT16 __fp16
#endif

APEX_HD float to_float(Half value) {
#if defined(__CUDACC__)
  return __half2float(bit_cast<__half>(value.bits));
#elif defined(APEX_FLOAT16)
  return static_cast<float>(bit_cast<APEX_FLOAT16>(value.bits));
#else
  return half_bits_to_float(value.bits);
#endif
}

APEX_HD Half to_half(float value) {
#if defined(__CUDACC__)
  return {bit_cast<uint16_t>(__float2half_rn(value))};
#elif defined(APEX_FLOAT16)
  return {bit_cast<uint16_t>(static_cast<APEX_FLOAT16>(value))};
#else
  return {float_to_half_bits(value)};
#endif
}

APEX_HD float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN, which adding the rounding bias could break.
APEX_HD BFloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // one instruction for six
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  uint32_t bits = bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
#endif
}

APEX_HD float to_float(CutBFloat16 value) { return to_float(BFloat16{value.bits}); }

// Without branches on values, so that compilers vectorize it.
APEX_HD float to_float(Float8 value) {
  uint32_t magnitude = value.bits & 0x7fu;
  float normal = bit_cast<float>((magnitude << 20) + (120u << 23));
  float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  uint32_t bits = bit_cast<uint32_t>(magnitude < 8 ? subnormal : normal);
  if (magnitude == 0x7f) bits = 0x7fc00000u;
  return bit_cast<float>(bits | (static_cast<uint32_t>(value.bits & 0x80u) << 24));
}

// Round to nearest even; what would round beyond 448 becomes NaN, as in torch.
APEX_HD Float8 to_float8(float value) {
  uint32_t bits = bit_cast<uint32_t>(value);
  uint32_t sign = (bits >> 24) & 0x80u;
  bits &= 0x7fffffffu;
  float magnitude = bit_cast<float>(bits);
  uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Adding 2^23 leaves the number of steps of 2^-9, rounded, in the lowest bits.
  uint32_t subnormal = bit_cast<uint32_t>(magnitude * 512.0f + 0x1p23f) & 0xffu;
  uint32_t code = magnitude < 0x1p-6f ? subnormal : normal;
  if (!(magnitude <= 464.0f)) code = 0x7fu;
  return {static_cast<uint8_t>(sign | code)};
}

APEX_HD float to_float(HighByte value) {
  return half_bits_to_float(static_cast<uint16_t>(value.bits << 8));
}

APEX_HD HighByte to_high_byte(float value) {
  return {static_cast<uint8_t>(float_to_half_bits(value) >> 8)};
}

// Storage to compute type and back; exact where To holds all values of From.
template <class To, class From>
APEX_HD To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16> ||
                       std::is_same_v<From, CutBFloat16> || std::is_same_v<From, Float8> ||
                       std::is_same_v<From, HighByte>) {
    return convert<To>(to_float(value));
  } else if constexpr (std::is_same_v<To, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, CutBFloat16>) {
    return {static_cast<uint16_t>(bit_cast<uint32_t>(static_cast<float>(value)) >> 16)};
  } else if constexpr (std::is_same_v<To, Float8>) {
    return to_float8(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, HighByte>) {
    return to_high_byte(static_cast<float>(value));
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

// Numbers that each column of a matrix has: vectors, `stride` elements apart.
template <class T>
struct ColumnVectors {
  const T* data = nullptr;  // of column 0
  int64_t stride = 0;

  APEX_HD const T* operator[](int vector) const { return data + vector * stride; }
};

// a * b + c, rounded once where processors do that. Explicit where a sum has two products:
// compilers choose one of them to round once, and choose otherwise in another kernel.
template <class T>
APEX_HD T multiply_add(T a, T b, T c) {
#if defined(APEX_GPU) || defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T>
APEX_HD bool is_finite(T value) {
  // inf - inf and nan - nan are nan; unlike isfinite() this stays one vector operation.
  return value - value == T(0);
}

// value, or zero where the condition holds. By bits: a choice of values becomes a branch where the
// result is rounded next (to bfloat16 on AVX2: 15 times the time).
template <class T>
APEX_HD T zero_where(bool condition, T value) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  return bit_cast<T>(bit_cast<Bits>(value) & (static_cast<Bits>(condition) - 1));
}

// The larger number; b if a is NaN. One instruction, where a NaN that wins takes a CPU ten.
template <class T>
APEX_HD T larger(T a, T b) {
#if defined(APEX_GPU)
  if constexpr (sizeof(T) == sizeof(float)) return std::fmax(a, b);
#endif
  return a > b ? a : b;
}

template <class T>
APEX_HD T max_propagating_nan(T a, T b) {
  // A NaN in either argument wins, as in torch.amax. Two selections: with `||`, compilers see a
  // branch, and take eight times as long for lanes one by one.
  T larger = a > b ? a : b;
  return a != a ? a : larger;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
