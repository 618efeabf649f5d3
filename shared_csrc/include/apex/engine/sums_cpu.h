// Sums over packs of lanes on the CPU, kept in registers.
#pragma once

#include <utility>

#include "apex/core/pack.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(__AVX512F__)
inline constexpr int kRegisterBytes = 64;
#elif defined(__AVX__)
inline constexpr int kRegisterBytes = 32;
#else
inline constexpr int kRegisterBytes = 16;
#endif

// kPack running sums. Compilers keep a plain array of them in memory, where every addition waits
// for the store of the one before (twice the time of a LayerNorm's forward); vector types they do
// not.
template <class T>
class LaneSums {
 public:
  void add(const T (&terms)[kPack]) { add(terms, Indices{}); }

  // The sum of all lanes; they are zero afterwards.
  T take() {
    alignas(kRegisterBytes) T lanes[kPack];
    take(lanes, Indices{});
    return tree_sum<kPack>(lanes);
  }

 private:
  typedef T Register __attribute__((vector_size(kRegisterBytes)));
  static constexpr int kWidth = kRegisterBytes / sizeof(T);
  using Indices = std::make_index_sequence<kPack / kWidth>;

  template <size_t... I>
  void add(const T (&terms)[kPack], std::index_sequence<I...>) {
    ((registers_[I] += load(terms + I * kWidth)), ...);
  }
  template <size_t... I>
  void take(T (&lanes)[kPack], std::index_sequence<I...>) {
    (memcpy(lanes + I * kWidth, &registers_[I], kRegisterBytes), ...);
    ((registers_[I] = Register{}), ...);
  }
  static Register load(const T* terms) {
    Register result;
    memcpy(&result, terms, kRegisterBytes);
    return result;
  }
  template <int N>
  static T tree_sum(T* lanes) {
    if constexpr (N == 1) {
      return lanes[0];
    } else {
      APEX_VECTORIZE
      for (int lane = 0; lane < N / 2; ++lane) lanes[lane] += lanes[lane + N / 2];
      return tree_sum<N / 2>(lanes);
    }
  }

  Register registers_[kPack / kWidth] = {};
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
