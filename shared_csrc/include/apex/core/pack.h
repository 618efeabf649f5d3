// Packs: short runs of consecutive elements, loaded from storage into compute-type arrays.
#pragma once

#include "apex/core/storage.h"

#if defined(APEX_GPU)
#include "apex/core/gpu_shapes.h"
#endif
#if defined(APEX_CPU)
#include "apex/core/pack_cpu.h"
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_GPU)

// 8 bits count as 16, and so does AnyFloat: packs of 16 elements for the sake of a mask, say, would
// take too many registers.
template <class S>
constexpr size_t pack_bytes() {
  return std::is_same_v<S, AnyFloat> || sizeof(S) == 1 ? 2 : sizeof(S);
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
#if defined(__CUDA_ARCH__)
  if constexpr (kStreamingStores && sizeof(vector) % 16 == 0) {
    const int4* words = reinterpret_cast<const int4*>(&vector);
#pragma unroll
    for (size_t i = 0; i < sizeof(vector) / 16; ++i) {
      __stcs(reinterpret_cast<int4*>(target) + i, words[i]);
    }
    return;
  }
#endif
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
  static_assert(N % kGroup == 0);
  load_groups(source, values, count);
  for (int i = round_to_groups(count); i < N; ++i) values[i] = T(0);
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
  store_groups(target, values, count);
#endif
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
