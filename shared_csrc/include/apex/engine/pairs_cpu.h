// bfloat16 elements two at a time on the CPU, as the halves of a 32-bit word.
//
// Widening them one by one takes shuffles, for which processors have few units. Of a word, the
// second element is a mask and the first a shift away. Lanes are then in another order, slots:
// first all even elements of a pack, then all odd ones.
#pragma once

#include <bit>

#include "apex/core/pack.h"
#include "apex/engine/stream_cpu.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Element 2 * word or, with kOdd, the next one. `elements` need not be aligned to words.
template <bool kOdd>
APEX_HD float half_of_word(const BFloat16* elements, int word) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t bits;
  memcpy(&bits, elements + 2 * word, sizeof(bits));
  return bit_cast<float>(kOdd ? bits & 0xffff0000u : bits << 16);
}

// Both elements of a word, rounded as by to_bfloat16().
APEX_HD void store_word(BFloat16* elements, int word, float even, float odd) {
  uint32_t low = bit_cast<uint32_t>(even), high = bit_cast<uint32_t>(odd);
  low = (low + 0x7fffu + ((low >> 16) & 1u)) >> 16;
  high = high + 0x7fffu + ((high >> 16) & 1u);
  low = even != even ? 0x7fc0u : low;
  high = odd != odd ? 0x7fc00000u : high;
  uint32_t bits = low | (high & 0xffff0000u);
  memcpy(elements + 2 * word, &bits, sizeof(bits));
}

// Whether lanes are taken in pairs, as the even and the odd elements of as many words. What several
// rows or runs share may be floats, which are put by slot once for all of them.
template <bool kSeveral, class View>
inline constexpr bool kIsPairable =
    std::is_same_v<typename View::storage, BFloat16> ||
    (kSeveral && is_shared_v<View> && std::is_same_v<typename View::storage, float>);
template <class T, bool kSeveral, class... Views>
inline constexpr bool kPaired = std::is_same_v<T, float> && (kIsPairable<kSeveral, Views> && ...);

// The same for groups. Without masks for 16 bits, an incomplete one is copied first, and that takes
// longer.
template <class T, bool kSeveral, class... Views>
inline constexpr bool kPairsOfGroups =
#if defined(__AVX512BW__)
    kPaired<T, kSeveral, Views...>;
#else
    false;
#endif

#if defined(__AVX512BW__)
// Whether the processor has an instruction that rounds floats to bfloat16. No ISA level promises
// it, hence the assembly below: compilers would want a level of its own.
inline const bool kRoundsBFloat16 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}();

// Which of 16 floats the instruction rounds otherwise than store_word(): it takes subnormal numbers
// for zero and keeps the bits of a NaN.
APEX_HD __mmask16 rounded_otherwise(const float* values) {
  constexpr int kQuietNaN = 0x01, kSubnormal = 0x20, kSignalingNaN = 0x80;
  return _mm512_fpclass_ps_mask(_mm512_loadu_ps(values), kQuietNaN | kSubnormal | kSignalingNaN);
}

// 16 words of what the instruction rounds.
APEX_HD __m512i words_by_instruction(const float* even, const float* odd) {
  alignas(64) static constexpr uint16_t kInTurn[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                     21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                     11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i halves;
  // volatile, or compilers move it out of a loop that stores a constant, before the question
  // whether the processor has it.
  asm volatile("vcvtne2ps2bf16 %1, %2, %0"
               : "=v"(halves)
               : "v"(_mm512_loadu_ps(even)), "v"(_mm512_loadu_ps(odd)));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), halves);
}

APEX_HD __mmask32 pairs_mask(int count) {
  return _bzhi_u32(0xffffffffu, static_cast<unsigned>(count));
}

// As load_group(), for two groups by slot. The masked intrinsics are the plain ones to the
// compiler, see pack_cpu.h.
APEX_HD void load_pairs(const BFloat16* source, float* even, float* odd, int count) {
  constexpr __mmask16 kAll = 0xffff;
  __m512i words = _mm512_maskz_loadu_epi16(pairs_mask(count), source);
  _mm512_storeu_si512(even, _mm512_maskz_slli_epi32(kAll, words, 16));
  _mm512_storeu_si512(odd, _mm512_and_si512(words, _mm512_set1_epi32(0xffff0000)));
}

APEX_HD void load_pairs(const float* source, float* even, float* odd, int count) {
  alignas(64) static constexpr int kEven[] = {0,  2,  4,  6,  8,  10, 12, 14,
                                              16, 18, 20, 22, 24, 26, 28, 30};
  alignas(64) float lower[kGroup], upper[kGroup];
  load_group(source, lower, count);
  load_group(source + kGroup, upper, count > kGroup ? count - kGroup : 0);
  __m512 first = _mm512_load_ps(lower), second = _mm512_load_ps(upper);
  __m512i places = _mm512_load_si512(kEven);
  _mm512_storeu_ps(even, _mm512_permutex2var_ps(first, places, second));
  places = _mm512_add_epi32(places, _mm512_set1_epi32(1));
  _mm512_storeu_ps(odd, _mm512_permutex2var_ps(first, places, second));
}

// A float as to_bfloat16() rounds it, in the upper half of its word; the lower one is of no use.
APEX_HD __m512i rounded_upwards(const float* values) {
  constexpr __mmask16 kAll = 0xffff;
  __m512i bits = _mm512_loadu_si512(values);
  __m512i last = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
  __m512i bias = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
  __m512 floats = _mm512_castsi512_ps(bits);
  __mmask16 is_nan = _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_add_epi32(bits, bias), is_nan, _mm512_set1_epi32(0x7fc00000));
}

// The words of a pair, each half rounded as by store_word().
APEX_HD __m512i words_of(const float* even, const float* odd, bool by_instruction) {
  const __mmask16 others = _kor_mask16(rounded_otherwise(even), rounded_otherwise(odd));
  if (by_instruction && _kortestz_mask16_u8(others, others)) {
    return words_by_instruction(even, odd);
  }
  constexpr __mmask16 kAll = 0xffff;
  constexpr __mmask32 kUpperHalves = 0xaaaaaaaa;
  __m512i lower = _mm512_maskz_srli_epi32(kAll, rounded_upwards(even), 16);
  return _mm512_mask_mov_epi16(lower, kUpperHalves, rounded_upwards(odd));
}

APEX_HD void store_pairs(BFloat16* target, const float* even, const float* odd, int count,
                         bool by_instruction = kRoundsBFloat16) {
  _mm512_mask_storeu_epi16(target, pairs_mask(count), words_of(even, odd, by_instruction));
}

// A whole pack that lies by slot. With `is_streamed`, `target` is a multiple of 64 bytes.
APEX_HD void store_slots(BFloat16* target, const float (&slots)[kPack], bool is_streamed,
                         bool by_instruction = kRoundsBFloat16) {
  constexpr int kWords = kPack / 2;
  for (int word = 0; word < kWords; word += kGroup) {
    const __m512i words = words_of(slots + word, slots + word + kWords, by_instruction);
    if (is_streamed) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 2 * word), words);
    } else {
      _mm512_storeu_si512(target + 2 * word, words);
    }
  }
}

// All of them, around the cache; `target` is a multiple of 64 bytes.
APEX_HD void stream_pairs(BFloat16* target, const float* even, const float* odd) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), words_of(even, odd, kRoundsBFloat16));
}
#endif

// N numbers that lie by slot, put in order of elements.
template <int N, class T>
void order_pairs(T* numbers) {
  T slots[N];
  memcpy(slots, numbers, sizeof(slots));
  for (int word = 0; word < N / 2; ++word) {
    numbers[2 * word] = slots[word];
    numbers[2 * word + 1] = slots[word + N / 2];
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
