// Packs: short runs of consecutive elements, loaded from storage into compute-type arrays.
#pragma once

#include "apex/core/storage.h"

#if defined(APEX_CPU) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_CPU)

// Elements per pack: four AVX-512 registers of float, enough to hide latency without spilling.
inline constexpr int kPack = 64;

template <int N, class T, class S>
APEX_HD void load_pack(const S* source, T (&values)[N]) {
  APEX_VECTORIZE
  for (int i = 0; i < N; ++i) values[i] = convert<T>(source[i]);
}

template <int N, class T, class S>
APEX_HD void store_pack(S* target, const T (&values)[N]) {
  APEX_VECTORIZE
  for (int i = 0; i < N; ++i) target[i] = convert<S>(values[i]);
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

template <int N>
APEX_HD void store_pack(Half* target, const float (&values)[N]) {
#if defined(__AVX512F__)
  static_assert(N % 16 == 0);
  for (int i = 0; i < N; i += 16) {
    __m512 floats = _mm512_loadu_ps(values + i);
    __m256i bits = _mm512_maskz_cvtps_ph(0xffff, floats, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), bits);
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

#else  // a GPU

// AnyFloat counts as 16 bits: packs of 16 elements for the sake of 8-bit operands would take too
// many registers.
template <class S>
constexpr size_t pack_bytes() {
  return std::is_same_v<S, AnyFloat> ? 2 : sizeof(S);
}

// Elements per pack such that the narrowest operand is read as one 16-byte vector.
template <class... S>
constexpr int pack_size() {
  size_t narrowest = 16;
  ((narrowest = pack_bytes<S>() < narrowest ? pack_bytes<S>() : narrowest), ...);
  return static_cast<int>(16 / narrowest);
}

template <class S, int N>
struct alignas(sizeof(S) * N > 16 ? 16 : sizeof(S) * N) Vector {
  S values[N];
};

// `source` must be aligned to the vector: is_aligned() below decides that per tensor.
template <int N, class T, class S>
APEX_HD void load_pack(const S* source, T (&values)[N]) {
  Vector<S, N> vector = *reinterpret_cast<const Vector<S, N>*>(source);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = convert<T>(vector.values[i]);
}

template <int N, class T, class S>
APEX_HD void store_pack(S* target, const T (&values)[N]) {
  Vector<S, N> vector;
#pragma unroll
  for (int i = 0; i < N; ++i) vector.values[i] = convert<S>(values[i]);
  *reinterpret_cast<Vector<S, N>*>(target) = vector;
}

template <int N, class S>
APEX_HD bool is_aligned(const S* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Vector<S, N>) == 0;
}

#endif

// The first `count` elements of a pack; the lanes behind them become zero and are never stored.
template <int N, class T, class S>
APEX_HD void load_some(const S* source, T (&values)[N], int count) {
#if defined(APEX_GPU)
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = i < count ? convert<T>(source[i]) : T(0);
#else
  for (int i = 0; i < count; ++i) values[i] = convert<T>(source[i]);
  for (int i = count; i < N; ++i) values[i] = T(0);
#endif
}

template <int N, class T, class S>
APEX_HD void store_some(S* target, const T (&values)[N], int count) {
#if defined(APEX_GPU)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) target[i] = convert<S>(values[i]);
  }
#else
  for (int i = 0; i < count; ++i) target[i] = convert<S>(values[i]);
#endif
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
