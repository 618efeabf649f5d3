// Compares both conversions of float16 (core/types.h) with the values that IEEE 754 gives each
// code, and with the processor's instructions: all 65,536 codes; all upper 20 bits of a float with
// lower bits around those that decide; and every STEP-th float (argument).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "apex/core/types.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace apex;

namespace {

long failures = 0;

void fail(const char* what, uint32_t from, uint32_t got, uint32_t expected) {
  if (++failures <= 20) std::printf("%s: %08x gave %08x, not %08x\n", what, from, got, expected);
}

double value_of(uint16_t half) {
  int exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;
  double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

// The nearest code, the even one of two, found without arithmetic on bits.
uint16_t nearest(float value) {
  double magnitude = std::fabs(static_cast<double>(value));
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  double step = std::ldexp(1.0, exponent < -13 ? -24 : exponent - 11);
  double rounded = std::nearbyint(magnitude / step) * step;
  if (rounded < 0x1p-14) return sign | static_cast<uint16_t>(rounded * 0x1p24);
  double fraction = std::frexp(rounded, &exponent);
  return sign | static_cast<uint16_t>(((exponent + 13) << 10) + fraction * 2048);
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) uint16_t by_instruction(float value) {
  return static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), 0), 0));
}
__attribute__((target("f16c"))) float by_instruction(uint16_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}
const bool kHasInstruction = __builtin_cpu_supports("avx2");  // as has every CPU with f16c
#else
uint16_t by_instruction(float value) { return to_half(value).bits; }
float by_instruction(uint16_t half) { return to_float(Half{half}); }
const bool kHasInstruction = true;
#endif

void check_narrowing(uint32_t bits) {
  float value = bit_cast<float>(bits);
  uint16_t got = float_to_half_bits(value);
  if (std::isnan(value)) {
    if ((got & 0x7e00) != 0x7e00 || (got >> 15) != (bits >> 31)) fail("NaN", bits, got, 0x7e00);
  } else if (uint16_t expected = nearest(value); got != expected) {
    fail("to half", bits, got, expected);
  }
  if (uint16_t chosen = to_half(value).bits; chosen != got) fail("to_half", bits, chosen, got);
  if (!kHasInstruction) return;
  if (uint16_t expected = by_instruction(value); got != expected) {
    fail("instruction to half", bits, got, expected);
  }
}

void check_widening(uint16_t half) {
  float got = half_bits_to_float(half);
  uint32_t bits = bit_cast<uint32_t>(got);
  double expected = value_of(half);
  if (std::isnan(expected) ? !std::isnan(got) || (bits >> 31) != (half >> 15)
                           : bits != bit_cast<uint32_t>(static_cast<float>(expected))) {
    fail("to float", half, bits, bit_cast<uint32_t>(static_cast<float>(expected)));
  }
  if (uint32_t chosen = bit_cast<uint32_t>(to_float(Half{half})); chosen != bits) {
    fail("to_float", half, chosen, bits);
  }
  if (!kHasInstruction) return;
  uint32_t instruction = bit_cast<uint32_t>(by_instruction(half));
  if (instruction != bits) fail("instruction to float", half, bits, instruction);
}

}  // namespace

int main(int, char** argv) {
  for (uint32_t half = 0; half < 0x10000; ++half) check_widening(static_cast<uint16_t>(half));
  for (uint64_t upper = 0; upper < 0x100000; ++upper) {
    for (uint32_t lower : {0x000, 0x001, 0x7ff, 0x800, 0x801, 0xfff}) {
      check_narrowing(static_cast<uint32_t>(upper << 12) | lower);
    }
  }
  uint64_t step = std::strtoull(argv[1], nullptr, 10);
  for (uint64_t bits = 0; bits < 0x100000000; bits += step) {
    check_narrowing(static_cast<uint32_t>(bits));
  }
  std::printf("%ld failures\n", failures);
  return failures == 0 ? 0 : 1;
}
