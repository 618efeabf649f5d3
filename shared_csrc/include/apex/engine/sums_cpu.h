// Sums over packs of lanes on the CPU, kept in registers.
#pragma once

#include <memory>
#include <new>
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

// Running sums begin with a cache line. Where operator new put them, about every other process had
// each of its stores cross two lines: LayerNorm's backward then took 1.3 times as long.
inline constexpr std::align_val_t kSumsAlignment{64};

struct DeleteSums {
  void operator()(void* sums) const { ::operator delete[](sums, kSumsAlignment); }
};

template <class T>
std::unique_ptr<T[], DeleteSums> zero_sums(int64_t count) {
  return std::unique_ptr<T[], DeleteSums>(new (kSumsAlignment) T[count]());
}

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::type;

// Half of a vector, in a register where the compiler can say so.
template <int kFirst, class T, int N, size_t... I>
void take_half(const Vector<T, 2 * N>& vector, Vector<T, N>& half, std::index_sequence<I...>) {
#if __has_builtin(__builtin_shufflevector)
  half = __builtin_shufflevector(vector, vector, (kFirst + static_cast<int>(I))...);
#else
  memcpy(&half, reinterpret_cast<const T*>(&vector) + kFirst, sizeof(half));
#endif
}

// The sum of all lanes: of the first half and the second, lane by lane, until one is left. Written
// as loops over an array, it is unrolled into one scalar addition per lane.
template <class T, int N>
T tree_sum(const Vector<T, N>& lanes) {
  if constexpr (N == 2) {
    return lanes[0] + lanes[1];
  } else {
    Vector<T, N / 2> first, second;
    take_half<0, T, N / 2>(lanes, first, std::make_index_sequence<N / 2>{});
    take_half<N / 2, T, N / 2>(lanes, second, std::make_index_sequence<N / 2>{});
    return tree_sum<T, N / 2>(first + second);
  }
}

// kLanes running sums, and beside them the sums of runs that have ended. Compilers keep a plain
// array of them in memory, where every addition waits for the store of the one before (twice the
// time of a LayerNorm's forward); vector types they do not.
template <class T, int kLanes = kPack>
class LaneSums {
 public:
  void add(const T (&terms)[kLanes]) { add(terms, Indices{}); }

  void end_run() { end_run(Indices{}); }

  // The sum of all runs that have ended; what follows begins with zero.
  T take() {
    fold(std::make_index_sequence<kCount / 2>{});
    T sum = tree_sum<T, kWidth>(ended_[0]);
    clear(Indices{});
    return sum;
  }

 private:
  static constexpr int kWidth = kRegisterBytes / sizeof(T);
  static constexpr int kCount = kLanes / kWidth;
  using Register = Vector<T, kWidth>;
  using Indices = std::make_index_sequence<kCount>;

  template <size_t... I>
  void add(const T (&terms)[kLanes], std::index_sequence<I...>) {
    ((registers_[I] += load(terms + I * kWidth)), ...);
  }
  template <size_t... I>
  void fold(std::index_sequence<I...>) {
    ((ended_[I] += ended_[I + sizeof...(I)]), ...);
    if constexpr (sizeof...(I) > 1) fold(std::make_index_sequence<sizeof...(I) / 2>{});
  }
  template <size_t... I>
  void clear(std::index_sequence<I...>) {
    ((ended_[I] = Register{}), ...);
  }
  template <size_t... I>
  void end_run(std::index_sequence<I...>) {
    ((ended_[I] += registers_[I]), ...);
    ((registers_[I] = Register{}), ...);
  }
  static Register load(const T* terms) {
    Register result;
    memcpy(&result, terms, kRegisterBytes);
    return result;
  }
  Register registers_[kCount] = {}, ended_[kCount] = {};
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
