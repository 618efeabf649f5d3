// Stores that go around the cache, for results too large to stay in it.
//
// A plain store reads the line it writes to first: a third of the traffic of a forward pass. It
// pays with whole lines only, hence with AVX-512.
#pragma once

#include "apex/core/pack.h"

#if defined(__AVX512F__) && defined(__linux__)
#include <sys/mman.h>
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

// Results of at least so many bytes are streamed: no later reader finds them in the second-level
// cache, and few in the third.
inline constexpr int64_t kStreamedBytes = int64_t{16} << 20;

// And in runs of at least so many bytes, such as one row: shorter ones took twice the time of plain
// stores.
inline constexpr int64_t kStreamedRun = 4096;

struct Streaming {
  int64_t bytes = kStreamedBytes, run = kStreamedRun;  // at least
};

// Programs that take several rows at once read two or three operands for a result: half of the size
// fills the caches, and runs may be shorter. Batch norm in bfloat16 (13 MB) took 0.85 of the time,
// and heads of tokens, forward and backward of RoPE (8 MB), 0.8 to 0.97.
inline constexpr Streaming kStreamingOfRows{kStreamedBytes / 2, kStreamedRun / 4};

inline bool can_stream(const void* address, int64_t run, int64_t bytes, Streaming least = {}) {
#if defined(__AVX512F__)
  return bytes >= least.bytes && run >= least.run && reinterpret_cast<uintptr_t>(address) % 64 == 0;
#else
  (void)address, (void)run, (void)bytes, (void)least;
  return false;
#endif
}

// Whether memory at an address has pages. Those that it lacks are filled with zeros at the first
// store, which leaves them in the cache: going around it takes twice the time then.
inline bool has_pages(const void* address) {
#if defined(__AVX512F__) && defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  unsigned char resident = 1;
  auto page = reinterpret_cast<uintptr_t>(address) / kPage * kPage;
  return mincore(reinterpret_cast<void*>(page), 1, &resident) != 0 || (resident & 1) != 0;
#else
  (void)address;
  return true;
#endif
}

// Both addresses are multiples of 64.
template <int kBytes>
APEX_HD void stream_bytes(void* target, const void* source) {
#if defined(__AVX512F__)
  static_assert(kBytes % 64 == 0);
#pragma GCC unroll 8
  for (int b = 0; b < kBytes; b += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(target) + b),
                        _mm512_load_si512(static_cast<const char*>(source) + b));
  }
#else
  (void)target, (void)source;
#endif
}

// Whether packs of a storage type are streamed as they are rounded: from memory, two or four stores
// would be read by one load, which waits for them (1.2 times the time of batch norm in float16).
template <class S>
inline constexpr bool kStreamsPacks =
#if defined(__AVX512F__)
    std::is_same_v<S, Half>;

template <int N>
APEX_HD void stream_pack(Half* target, const float (&values)[N]) {
  for (int i = 0; i < N; i += 32) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), to_line_of_halves(values, i));
  }
}
#else
    false;
#endif

// Streamed stores become visible to other threads.
inline void finish_streams() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
