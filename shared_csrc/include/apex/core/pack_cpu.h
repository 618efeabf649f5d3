// Packs on the CPU, and parts of them: groups of 16 elements, of which the last may be incomplete.
#pragma once

#include "apex/core/storage.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per pack: four AVX-512 registers of float, enough to hide latency without spilling.
inline constexpr int kPack = 64;

template <int N, class To, class From>
APEX_HD void convert_all(const From* from, To* to) {
  if constexpr (N <= 16) {
    APEX_VECTORIZE_FEW
    for (int i = 0; i < N; ++i) to[i] = convert<To>(from[i]);
  } else {
    APEX_VECTORIZE
    for (int i = 0; i < N; ++i) to[i] = convert<To>(from[i]);
  }
}

template <int N, class T, class S>
APEX_HD void load_pack(const S* source, T (&values)[N]) {
  convert_all<N>(source, values);
}

template <int N, class T, class S>
APEX_HD void store_pack(S* target, const T (&values)[N]) {
  convert_all<N>(values, target);
}

#if defined(__F16C__)
// Compilers do not vectorize _Float16 conversions before GCC 13. Vectors are as wide as those of
// the loops around: reading two stores by one load stalls. The masked intrinsics are the plain ones
// to the compiler, without GCC 12's warning about the undefined operand of the latter.
template <int N>
APEX_HD void load_pack(const Half* source, float (&values)[N]) {
#if defined(__AVX512F__)
  static_assert(N % 16 == 0);
  for (int i = 0; i < N; i += 16) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    _mm512_storeu_ps(values + i, _mm512_maskz_cvtph_ps(0xffff, bits));
  }
#else
  static_assert(N % 8 == 0);
  for (int i = 0; i < N; i += 8) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(bits));
  }
#endif
}

#if defined(__AVX512F__)
template <int N>
APEX_HD __m256i to_halves(const float (&values)[N], int first) {
  __m512 floats = _mm512_loadu_ps(values + first);
  return _mm512_maskz_cvtps_ph(0xffff, floats, _MM_FROUND_TO_NEAREST_INT);
}

template <int N>
APEX_HD __m512i to_line_of_halves(const float (&values)[N], int first) {
  __m512i lower = _mm512_castsi256_si512(to_halves(values, first));
  return _mm512_maskz_inserti64x4(0xff, lower, to_halves(values, first + 16), 1);
}
#endif

template <int N>
APEX_HD void store_pack(Half* target, const float (&values)[N]) {
#if defined(__AVX512F__)
  static_assert(N % 16 == 0);
  if constexpr (N % 32 == 0) {
    for (int i = 0; i < N; i += 32) _mm512_storeu_si512(target + i, to_line_of_halves(values, i));
  } else {
    for (int i = 0; i < N; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), to_halves(values, i));
    }
  }
#else
  static_assert(N % 8 == 0);
  for (int i = 0; i < N; i += 8) {
    __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), bits);
  }
#endif
}
#endif  // __F16C__

// Loops over groups are vectors whatever the count. A loop over the rest of a row ends in scalars,
// and took up to seven times as long as the same loop over a whole pack.
inline constexpr int kGroup = 16;

// The number of elements in `count` and the rest of the last group.
APEX_HD int round_to_groups(int count) { return (count + kGroup - 1) / kGroup * kGroup; }

// memcpy() of less than a group, without a call: that takes longer than a row of one group.
template <class S>
APEX_HD void copy_some(S* to, const S* from, int count) {
  static_assert(kGroup == 16);
  auto copy = [&]<int N>() {
    if ((count & N) == 0) return;
    memcpy(to, from, N * sizeof(S));
    to += N, from += N;
  };
  copy.template operator()<8>();
  copy.template operator()<4>();
  copy.template operator()<2>();
  copy.template operator()<1>();
}

// An incomplete group goes through memory of its own: neither reads nor writes leave the operand.
template <class T, class S>
APEX_HD void load_group(const S* source, T* values, int count) {
  auto& all = *reinterpret_cast<T(*)[kGroup]>(values);
  if (count >= kGroup) return load_pack(source, all);
  alignas(64) S own[kGroup] = {};
  copy_some(own, source, count);
  load_pack(own, all);
}

template <class T, class S>
APEX_HD void store_group(S* target, const T* values, int count) {
  auto& all = *reinterpret_cast<const T(*)[kGroup]>(values);
  if (count >= kGroup) return store_pack(target, all);
  alignas(64) S own[kGroup];
  store_pack(own, all);
  copy_some(target, own, count);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// As above, but masks leave out what is not there: no copy, whose stores a wide load would wait
// for.
APEX_HD __mmask16 group_mask(int count) {
  return static_cast<__mmask16>(_bzhi_u32(0xffffu, static_cast<unsigned>(count)));
}

APEX_HD void load_group(const float* source, float* values, int count) {
  _mm512_storeu_ps(values, _mm512_maskz_loadu_ps(group_mask(count), source));
}
APEX_HD void store_group(float* target, const float* values, int count) {
  _mm512_mask_storeu_ps(target, group_mask(count), _mm512_loadu_ps(values));
}

APEX_HD void load_group(const double* source, double* values, int count) {
  __mmask16 mask = group_mask(count);
  _mm512_storeu_pd(values, _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), source));
  _mm512_storeu_pd(values + 8, _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask >> 8), source + 8));
}
APEX_HD void store_group(double* target, const double* values, int count) {
  __mmask16 mask = group_mask(count);
  _mm512_mask_storeu_pd(target, static_cast<__mmask8>(mask), _mm512_loadu_pd(values));
  _mm512_mask_storeu_pd(target + 8, static_cast<__mmask8>(mask >> 8), _mm512_loadu_pd(values + 8));
}

APEX_HD void load_group(const BFloat16* source, float* values, int count) {
  __m256i bits = _mm256_maskz_loadu_epi16(group_mask(count), source);
  __m512i words = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
  _mm512_storeu_si512(values, words);
}
// Rounded as by to_bfloat16(), whose loop compilers leave in scalars here.
APEX_HD void store_group(BFloat16* target, const float* values, int count) {
  constexpr __mmask16 kAll = 0xffff;
  __m512i bits = _mm512_loadu_si512(values);
  __m512i last = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
  __m512i bias = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
  __m512i rounded = _mm512_maskz_srli_epi32(kAll, _mm512_add_epi32(bits, bias), 16);
  __m512 floats = _mm512_castsi512_ps(bits);
  __mmask16 is_nan = _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(target, group_mask(count), _mm512_maskz_cvtepi32_epi16(kAll, rounded));
}

APEX_HD void load_group(const uint8_t* source, float* values, int count) {
  constexpr __mmask16 kAll = 0xffff;
  __m128i bytes = _mm_maskz_loadu_epi8(group_mask(count), source);
  __m512i words = _mm512_maskz_cvtepu8_epi32(kAll, bytes);
  _mm512_storeu_ps(values, _mm512_maskz_cvtepi32_ps(kAll, words));
}

APEX_HD void load_group(const Half* source, float* values, int count) {
  __m256i bits = _mm256_maskz_loadu_epi16(group_mask(count), source);
  _mm512_storeu_ps(values, _mm512_maskz_cvtph_ps(0xffff, bits));
}
APEX_HD void store_group(Half* target, const float* values, int count) {
  __m512 floats = _mm512_loadu_ps(values);
  __m256i bits = _mm512_maskz_cvtps_ph(0xffff, floats, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(target, group_mask(count), bits);
}
#elif defined(__AVX2__)
// As above, but masks leave out what is not there, which AVX2 has for 32 bits.
APEX_HD __m256i group_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

APEX_HD void load_group(const float* source, float* values, int count) {
  _mm256_storeu_ps(values, _mm256_maskload_ps(source, group_mask(count)));
  _mm256_storeu_ps(values + 8, _mm256_maskload_ps(source + 8, group_mask(count - 8)));
}
APEX_HD void store_group(float* target, const float* values, int count) {
  _mm256_maskstore_ps(target, group_mask(count), _mm256_loadu_ps(values));
  _mm256_maskstore_ps(target + 8, group_mask(count - 8), _mm256_loadu_ps(values + 8));
}
#endif

// The first `count` elements of a pack in whole groups: zeros follow up to the end of the last one.
template <class T, class S>
APEX_HD void load_groups(const S* source, T* values, int count) {
  for (int i = 0; i < count; i += kGroup) {
    load_group(source + i, values + i, count - i < kGroup ? count - i : kGroup);
  }
}

template <class T, class S>
APEX_HD void store_groups(S* target, const T* values, int count) {
  for (int i = 0; i < count; i += kGroup) {
    store_group(target + i, values + i, count - i < kGroup ? count - i : kGroup);
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
