// Philox4x32-10: random numbers that depend on a key and a counter alone, so that any thread, GPU
// or process computes the same ones, in any order.
//
// Salmon, Moraes, Dror & Shaw 2011, section 3.3 (https://doi.org/10.1145/2063384.2063405).
#pragma once

#include "apex/core/types.h"

#if defined(APEX_CPU) && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxLeft = 0xD2511F53u, kPhiloxRight = 0xCD9E8D57u;  // factors
inline constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;   // steps of keys

// Four words of random bits of a counter of four words and a key of two.
APEX_HD Array<uint32_t, 4> philox(Array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
  uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t left = static_cast<uint64_t>(a) * kPhiloxLeft;
    const uint64_t right = static_cast<uint64_t>(c) * kPhiloxRight;
    a = static_cast<uint32_t>(right >> 32) ^ b ^ key0;
    b = static_cast<uint32_t>(right);
    c = static_cast<uint32_t>(left >> 32) ^ d ^ key1;
    d = static_cast<uint32_t>(left);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return {{a, b, c, d}};
}

// The upper 24 bits as a multiple of 2^-24 in [0, 1), which every type here holds exactly.
APEX_HD float uniform_of(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
}

#if defined(APEX_CPU) && defined(__AVX512BW__)
#define APEX_PHILOX_VECTORS 1
// A counter in each lane of 64 bits, whose upper halves may hold anything: compilers make no
// vectors of the loop above, which takes four times as long. The masked intrinsics are the plain
// ones to the compiler, without GCC 12's warning about the undefined operand of the latter.
struct PhiloxLanes {
  using Vector = __m512i;
  static constexpr int kGroups = 8;

  // The order in which unpack() leaves groups of four words one behind the other.
  static APEX_HD Vector offsets() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
  static APEX_HD Vector all(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
  static APEX_HD Vector plus(Vector a, Vector b) { return _mm512_add_epi64(a, b); }
  static APEX_HD Vector exclusive(Vector a, Vector b) { return _mm512_xor_si512(a, b); }
  static APEX_HD Vector product(Vector a, Vector b) { return _mm512_maskz_mul_epu32(0xff, a, b); }
  static APEX_HD Vector upper(Vector a) { return _mm512_maskz_srli_epi64(0xff, a, 32); }
  static APEX_HD Vector pairs(Vector even, Vector odd) {
    return _mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA);
  }
  static APEX_HD Vector low(Vector a, Vector b) { return _mm512_maskz_unpacklo_epi64(0xff, a, b); }
  static APEX_HD Vector high(Vector a, Vector b) { return _mm512_maskz_unpackhi_epi64(0xff, a, b); }
  static APEX_HD void store(uint16_t* target, Vector words) { _mm512_storeu_si512(target, words); }
  static APEX_HD Vector load(const uint16_t* source) { return _mm512_loadu_si512(source); }
  // Each 16 bits replaced by those `n` places behind them in their 128 bits.
  template <int n>
  static APEX_HD Vector turned(Vector words) {
    return _mm512_maskz_alignr_epi8(~0ull, words, words, 2 * n);
  }
  static APEX_HD void store(float* target, Vector words) {
    __m512 whole = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_srli_epi32(0xffff, words, 8));
    _mm512_storeu_ps(target, _mm512_mul_ps(whole, _mm512_set1_ps(0x1p-24f)));
  }
};
#elif defined(APEX_CPU) && defined(__AVX2__)
#define APEX_PHILOX_VECTORS 1
// As above: a counter in each lane of 64 bits.
struct PhiloxLanes {
  using Vector = __m256i;
  static constexpr int kGroups = 4;

  static APEX_HD Vector offsets() { return _mm256_setr_epi64x(0, 2, 1, 3); }
  static APEX_HD Vector all(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
  static APEX_HD Vector plus(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
  static APEX_HD Vector exclusive(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
  static APEX_HD Vector product(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
  static APEX_HD Vector upper(Vector a) { return _mm256_srli_epi64(a, 32); }
  static APEX_HD Vector pairs(Vector even, Vector odd) {
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  }
  static APEX_HD Vector low(Vector a, Vector b) { return _mm256_unpacklo_epi64(a, b); }
  static APEX_HD Vector high(Vector a, Vector b) { return _mm256_unpackhi_epi64(a, b); }
  static APEX_HD void store(uint16_t* target, Vector words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), words);
  }
  static APEX_HD Vector load(const uint16_t* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  }
  // Each 16 bits replaced by those `n` places behind them in their 128 bits.
  template <int n>
  static APEX_HD Vector turned(Vector words) {
    return _mm256_alignr_epi8(words, words, 2 * n);
  }
  static APEX_HD void store(float* target, Vector words) {
    __m256 whole = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8));
    _mm256_storeu_ps(target, _mm256_mul_ps(whole, _mm256_set1_ps(0x1p-24f)));
  }
};
#endif

#if defined(APEX_PHILOX_VECTORS)
// Stores the words of kCounters counters, in order: kPerWord elements of T for each. `counter` is
// the first two words of the first one, which count up, then the third and the fourth.
template <int kCounters, int kPerWord, class T>
APEX_HD void store_philox(Array<uint64_t, 3> counter, uint64_t key, T* target) {
  using L = PhiloxLanes;
  static_assert(kCounters % L::kGroups == 0);
  const uint64_t number = counter[0];
  const L::Vector left = L::all(kPhiloxLeft), right = L::all(kPhiloxRight);
  for (int g = 0; g < kCounters; g += L::kGroups) {
    L::Vector a = L::plus(L::all(number + static_cast<uint64_t>(g)), L::offsets());
    L::Vector b = L::upper(a);
    L::Vector c = L::all(counter[1]), d = L::all(counter[2]);
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const L::Vector of_a = L::product(a, left), of_c = L::product(c, right);
      a = L::exclusive(L::exclusive(L::upper(of_c), b), L::all(key0));
      c = L::exclusive(L::exclusive(L::upper(of_a), d), L::all(key1));
      b = of_c;
      d = of_a;
      key0 += kPhiloxKey0;
      key1 += kPhiloxKey1;
    }
    const L::Vector ab = L::pairs(a, b), cd = L::pairs(c, d);
    L::store(target + 4 * kPerWord * g, L::low(ab, cd));
    L::store(target + 4 * kPerWord * g + 2 * kPerWord * L::kGroups, L::high(ab, cd));
  }
}
#endif

// Numbers in [0, 1) by index: word index % 4 of counter index / 4, under a key of 64 bits.
struct UniformNumbers {
  uint64_t key;
  uint64_t begin = 0;  // added to each index; a multiple of 4

  APEX_HD Array<uint32_t, 4> group(uint64_t number) const {
    return philox({{static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0, 0}},
                  static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }

  // Those of `first` and the N - 1 behind it; with N a multiple of 4, `first` must be one.
  template <int N, class T>
  APEX_HD void fill(uint64_t first, T (&numbers)[N]) const {
    first += begin;
#if defined(APEX_PHILOX_VECTORS)
    if constexpr (N % (4 * PhiloxLanes::kGroups) == 0) {
      if constexpr (std::is_same_v<T, float>)
        return store_philox<N / 4, 1>({{first / 4, 0, 0}}, key, numbers);
      alignas(64) float floats[N];
      store_philox<N / 4, 1>({{first / 4, 0, 0}}, key, floats);
      for (int i = 0; i < N; ++i) numbers[i] = T(floats[i]);
      return;
    }
#endif
    if constexpr (N % 4 == 0) {
      for (int g = 0; g < N / 4; ++g) {
        const Array<uint32_t, 4> bits = group(first / 4 + static_cast<uint64_t>(g));
        for (int i = 0; i < 4; ++i) numbers[4 * g + i] = T(uniform_of(bits[i]));
      }
    } else {
      for (int i = 0; i < N; ++i) {
        const uint64_t index = first + static_cast<uint64_t>(i);
        numbers[i] = T(uniform_of(group(index / 4)[static_cast<int>(index % 4)]));
      }
    }
  }
};

// 16 random bits by index. Eight counters (number, low and high, then third and fourth), 64 halves
// of their words, lower ones first, serve a run of 512 indices, in eight parts. Part 0 is the
// halves. The others are an exclusive or of each half and of one or two that are some places behind
// it in its counter's ring of eight: 1; 2; 3; 1 and 2; 1 and 3; 1 and 4; 1 and 5. No two indices
// have the same halves, hence any two are independent, and sums have the variance of independent
// numbers, at an eighth of the cost.
struct RandomHalves {
  using value_type = uint16_t;
  static constexpr int kRun = 512, kPart = 64, kGroup = 8;

  uint64_t key;
  uint32_t third, fourth;

  APEX_HD Array<uint32_t, 4> group(uint64_t number) const {
    return philox(
        {{static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), third, fourth}},
        static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }

  // Those of `first`, a multiple of 8, and the 7 behind it.
  APEX_HD void fill_group(uint64_t first, uint16_t (&halves)[kGroup]) const {
    const int part = static_cast<int>(first % kRun) / kPart;
    const Array<uint32_t, 4> own = group(first / kRun * (kPart / kGroup) + first % kPart / kGroup);
    const Array<uint32_t, 4> second = turned(own, part < 4 ? part : 1);
    const Array<uint32_t, 4> other = turned(own, part < 4 ? 0 : part - 2);
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = own[i] ^ (part > 0 ? second[i] : 0) ^ (part > 3 ? other[i] : 0);
      halves[2 * i] = static_cast<uint16_t>(word);
      halves[2 * i + 1] = static_cast<uint16_t>(word >> 16);
    }
  }

  APEX_HD uint16_t at(uint64_t index) const {
    uint16_t halves[kGroup];
    fill_group(index / kGroup * kGroup, halves);
    return halves[index % kGroup];
  }

  // Those of `first`, a multiple of N, and the N - 1 behind it.
  template <int N>
  APEX_HD void fill(uint64_t first, uint16_t (&halves)[N]) const {
    static_assert(N % kGroup == 0 && kRun % N == 0);
#if defined(APEX_PHILOX_VECTORS)
    if constexpr (N == kRun) return fill_run(first / kRun * (kPart / kGroup), halves);
#endif
    for (int g = 0; g < N; g += kGroup) {
      uint16_t own[kGroup];
      fill_group(first + static_cast<uint64_t>(g), own);
      for (int i = 0; i < kGroup; ++i) halves[g + i] = own[i];
    }
  }

 private:
  // Each half replaced by the one `n` places behind it. Without an index into memory that is only
  // known as it runs, for the sake of GPUs.
  APEX_HD static Array<uint32_t, 4> turned(const Array<uint32_t, 4>& words, int n) {
    Array<uint32_t, 4> by4, by2, by1;
    for (int i = 0; i < 4; ++i) by4[i] = (n & 4) != 0 ? words[(i + 2) % 4] : words[i];
    for (int i = 0; i < 4; ++i) by2[i] = (n & 2) != 0 ? by4[(i + 1) % 4] : by4[i];
    for (int i = 0; i < 4; ++i) {
      by1[i] = (n & 1) != 0 ? (by2[i] >> 16) | (by2[(i + 1) % 4] << 16) : by2[i];
    }
    return by1;
  }

#if defined(APEX_PHILOX_VECTORS)
  APEX_HD void fill_run(uint64_t number, uint16_t (&halves)[kRun]) const {
    using L = PhiloxLanes;
    constexpr int kHalves = kGroup * L::kGroups / 2;  // of a vector
    store_philox<kPart / kGroup, 2>({{number, third, fourth}}, key, halves);
    for (int i = 0; i < kPart; i += kHalves) {
      const L::Vector own = L::load(halves + i), behind = L::turned<1>(own);
      const L::Vector pair = L::exclusive(own, behind);
      const L::Vector second = L::turned<2>(own), other = L::turned<3>(own);
      L::store(halves + 1 * kPart + i, pair);
      L::store(halves + 2 * kPart + i, L::exclusive(own, second));
      L::store(halves + 3 * kPart + i, L::exclusive(own, other));
      L::store(halves + 4 * kPart + i, L::exclusive(pair, second));
      L::store(halves + 5 * kPart + i, L::exclusive(pair, other));
      L::store(halves + 6 * kPart + i, L::exclusive(pair, L::turned<4>(own)));
      L::store(halves + 7 * kPart + i, L::exclusive(pair, L::turned<5>(own)));
    }
  }
#endif
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
