// Packs of a row's operands on a GPU, in a thread's registers: all that is read is loaded before
// the first number is used.
#pragma once

#include <utility>

#include "apex/core/gpu.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The index of a pack, as functors of a pass get it, of an element that fills none.
inline constexpr int kNoPack = -1;

// A pack as it is stored, in words: compilers give each number of 16 bits a register of its own.
template <class S, int N>
struct StoredPack {
  static constexpr int kWords = (sizeof(S) * N + 3) / 4;
  unsigned words[kWords];

  template <bool kAligned>
  APEX_DEVICE void load(const S* from) {
    if constexpr (kAligned) {
      const Vector<S, N> vector = *reinterpret_cast<const Vector<S, N>*>(from);
      memcpy(words, &vector, sizeof(vector));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) set(i, from[i]);
    }
  }

  // Numbers are set in their order.
  APEX_DEVICE void set(int i, S value) {
    if constexpr (sizeof(S) >= 4) {
      memcpy(words + i * sizeof(S) / 4, &value, sizeof(S));
    } else {
      unsigned bits = 0;
      memcpy(&bits, &value, sizeof(S));
      const int byte = i * sizeof(S);
      words[byte / 4] = byte % 4 == 0 ? bits : words[byte / 4] | bits << byte % 4 * 8;
    }
  }

  APEX_DEVICE S get(int i) const {
    S value;
    if constexpr (sizeof(S) >= 4) {
      memcpy(&value, words + i * sizeof(S) / 4, sizeof(S));
    } else {
      const int byte = i * sizeof(S);
      const unsigned bits = words[byte / 4] >> byte % 4 * 8;
      memcpy(&value, &bits, sizeof(S));
    }
    return value;
  }

  template <class T>
  APEX_DEVICE void values(T (&into)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) into[i] = convert<T>(get(i));
  }

  // Itself, of which CUDA's compilers do not see that: they would convert a kept pack once, and
  // then have no registers for the numbers of all packs. AMD's GPUs have twice as many.
  APEX_DEVICE StoredPack again() const {
    StoredPack copy = *this;
#if defined(__CUDA_ARCH__)
#pragma unroll
    for (unsigned& word : copy.words) asm volatile("" : "+r"(word));
#endif
    return copy;
  }
};

// A row that its threads keep as it is stored, to be read several times.
template <class S, int N, int kPacks>
struct KeptView {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
  const S* data;
  StoredPack<S, N> packs[kPacks];  // this thread's, where they are whole
};

template <class View>
inline constexpr int kept_pack_v = 0;
template <class S, int N, int kPacks>
inline constexpr int kept_pack_v<KeptView<S, N, kPacks>> = N;

// A vector that is the same for all runs of a row: loaded ahead of the first.
template <class S>
struct FixedView : ReadView<S> {};

template <class View>
APEX_DEVICE const View& fixed(const View& view) {
  return view;
}
template <class S>
APEX_DEVICE FixedView<S> fixed(const SharedView<S>& view) {
  return {{view.data}};
}

// Elements of a pack of these views: of 16 bytes of the narrowest, or as they are kept.
template <class... Views>
constexpr int pack_of() {
  int kept = 0;
  ((kept = kept_pack_v<Views> ? kept_pack_v<Views> : kept), ...);
  return kept ? kept : pack_size<typename Views::storage...>();
}

// Loads of 16 bytes that a pack takes.
template <int N, class View>
constexpr int loads_of() {
  using S = typename View::storage;
  if (!View::kRead || is_generated_v<View> || kept_pack_v<View>) return 0;
  const int bytes =
      N * static_cast<int>(sizeof(std::conditional_t<std::is_same_v<S, AnyFloat>, float, S>));
  return bytes > 16 ? bytes / 16 : 1;
}

// How many packs of these views a thread has under way, of kPacks that it takes one after the
// other: what is loaded takes registers until it is used. Beside what is kept, there is mostly what
// all rows share, which the caches have.
template <int N, int kPacks, class... Views>
constexpr int packs_under_way() {
  const int most = (kept_pack_v<Views> + ... + 0) ? kRowLoads / 2 : kRowLoads;
  int packs = kPacks;
  while (packs > 1 && packs * (0 + ... + loads_of<N, Views>()) > most) packs /= 2;
  return packs;
}

template <class View>
inline constexpr bool is_fixed_v = false;
template <class S>
inline constexpr bool is_fixed_v<FixedView<S>> = true;

// How many rows a thread loads before it uses the first. Single elements take fewer registers than
// packs: there are up to twice as many, or a half more where results take registers, too.
template <int N, class... Views>
constexpr int rows_under_way() {
  const int loads = (0 + ... + (is_fixed_v<Views> ? 0 : loads_of<N, Views>()));
  const bool is_written = (false || ... || Views::kWritten);
  const int most = N > 1 ? kRowLoads : is_written ? 3 * kRowLoads / 2 : 2 * kRowLoads;
  int rows = is_written ? most : kRowLoads;
  while (rows > 1 && rows * loads > most) rows /= 2;
  return rows;
}

// Whether packs of N elements may be loaded and stored at every multiple of N of this view.
template <int N, class View>
APEX_DEVICE bool view_aligned(const View& view) {
  if constexpr (is_generated_v<View> || kept_pack_v<View> != 0) {
    return true;
  } else {
    return is_aligned<N>(view.data);
  }
}

// kUnderWay packs of one view: load() as it is stored, values() when it is used.
template <class T, int N, int kUnderWay, class View>
struct LoadedPacks {
  using S = typename View::storage;
  StoredPack<S, N> packs[kUnderWay];

  template <bool kAligned>
  APEX_DEVICE void load(const View& view, int64_t offset, int u) {
    packs[u].template load<kAligned>(view.data + offset);
  }
  template <bool kAligned>
  APEX_DEVICE void load_fixed(const View&, int64_t) {}
  APEX_DEVICE void values(const View&, int64_t, int u, int, T (&into)[N]) const {
    packs[u].values(into);
  }
};

template <class T, int N, int kUnderWay, class S>
struct LoadedPacks<T, N, kUnderWay, FixedView<S>> {
  StoredPack<S, N> pack;

  template <bool kAligned>
  APEX_DEVICE void load(const FixedView<S>&, int64_t, int) {}
  template <bool kAligned>
  APEX_DEVICE void load_fixed(const FixedView<S>& view, int64_t column) {
    pack.template load<kAligned>(view.data + column);
  }
  APEX_DEVICE void values(const FixedView<S>&, int64_t, int, int, T (&into)[N]) const {
    pack.values(into);
  }
};

// What is loaded nowhere.
template <class T, int N, class View>
struct MadePacks {
  template <bool kAligned>
  APEX_DEVICE void load(const View&, int64_t, int) {}
  template <bool kAligned>
  APEX_DEVICE void load_fixed(const View&, int64_t) {}
};

template <class T, int N, int kUnderWay, class View>
  requires(!View::kRead)
struct LoadedPacks<T, N, kUnderWay, View> : MadePacks<T, N, View> {
  APEX_DEVICE void values(const View&, int64_t, int, int, T (&into)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) into[i] = T(0);
  }
};

template <class T, int N, int kUnderWay, class Numbers>
struct LoadedPacks<T, N, kUnderWay, GeneratedView<Numbers>>
    : MadePacks<T, N, GeneratedView<Numbers>> {
  APEX_DEVICE void values(const GeneratedView<Numbers>& view, int64_t column, int, int,
                          T (&into)[N]) const {
    view.fill(column, into);
  }
};

// Elements that fill no pack are not kept.
template <class T, int N, int kUnderWay, class S, int kKept, int kPacks>
struct LoadedPacks<T, N, kUnderWay, KeptView<S, kKept, kPacks>>
    : MadePacks<T, N, KeptView<S, kKept, kPacks>> {
  APEX_DEVICE void values(const KeptView<S, kKept, kPacks>& view, int64_t column, int, int pack,
                          T (&into)[N]) const {
    static_assert(N == kKept || N == 1);
    if constexpr (N == 1) {
      into[0] = convert<T>(view.data[column]);
    } else {
      view.packs[pack].again().values(into);
    }
  }
};

template <int N, class T, class View>
APEX_DEVICE void store_view(bool aligned, const View& view, int64_t offset, const T (&values)[N]) {
  if (aligned) {
    store_pack(view.data + offset, values);
  } else {
    store_some(view.data + offset, values, N);
  }
}

template <size_t, class Packs>
struct PacksOf : Packs {};

template <class T, int N, int kUnderWay, class Indices, class... Views>
class Operands;

template <class T, int N, int kUnderWay, size_t... I, class... Views>
class Operands<T, N, kUnderWay, std::index_sequence<I...>, Views...>
    : PacksOf<I, LoadedPacks<T, N, kUnderWay, Views>>... {
  template <size_t K, class View>
  using At = PacksOf<K, LoadedPacks<T, N, kUnderWay, View>>;

 public:
  APEX_DEVICE void load_fixed(bool aligned, int64_t column, const Views&... views) {
    if (aligned) {
      (At<I, Views>::template load_fixed<true>(views, column), ...);
    } else {
      (At<I, Views>::template load_fixed<false>(views, column), ...);
    }
  }

  // body(u, lane, values...) for the packs under way of which has(u), at offset(view, u); they are
  // from `first` on of those that are kept.
  template <class Has, class Offset, class Body>
  APEX_DEVICE void run(bool aligned, int first, const Has& has, const Offset& offset,
                       const Body& body, const Views&... views) {
    if (aligned) {
      load<true>(has, offset, views...);
    } else {
      load<false>(has, offset, views...);
    }
    use(aligned, first, has, offset, body, views...);
  }

  template <bool kAligned, class Has, class Offset>
  APEX_DEVICE void load(const Has& has, const Offset& offset, const Views&... views) {
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      if (has(u)) (At<I, Views>::template load<kAligned>(views, offset(views, u), u), ...);
    }
  }

  // Behind load(), with the same has() and offset().
  template <class Has, class Offset, class Body>
  APEX_DEVICE void use(bool aligned, int first, const Has& has, const Offset& offset,
                       const Body& body, const Views&... views) const {
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      if (!has(u)) continue;
      T values[sizeof...(Views)][N];
      (At<I, Views>::values(views, offset(views, u), u, first + u, values[I]), ...);
#pragma unroll
      for (int lane = 0; lane < N; ++lane) body(u, lane, values[I][lane]...);
      (store(aligned, views, offset(views, u), values[I]), ...);
    }
  }

 private:
  template <class View>
  APEX_DEVICE static void store(bool aligned, const View& view, int64_t offset,
                                const T (&values)[N]) {
    if constexpr (View::kWritten) store_view(aligned, view, offset, values);
  }
};

// Programs with several results take a third more registers where each way of loading has a loop.
template <class... Views>
inline constexpr bool kHasOneResult = (0 + ... + (Views::kWritten ? 1 : 0)) == 1;

// The pack at `column` of runs `first`, `first + at_once` and so on of `count`. One loop for each
// way of loading: loads would wait for each other behind a branch.
template <class T, bool kAligned, int M, class Body, class... Views>
APEX_DEVICE void walk_runs(int64_t column, int first, int at_once, int64_t count, const Body& body,
                           const Views&... views) {
  constexpr int kMost =
      rows_under_way<M, Views...>() / 2;  // of more, programs of several loops spill
  constexpr int kUnderWay = kAligned && kMost > 1 ? kMost : 1;
  Operands<T, M, kUnderWay, std::index_sequence_for<Views...>, Views...> operands;
  operands.load_fixed(kAligned, column, views...);
#pragma unroll 1
  for (int64_t run = first; run < count; run += at_once * kUnderWay) {
    auto has = [&](int u) { return run + u * at_once < count; };
    auto offset = [&](const auto& view, int u) {
      return column + (run + u * at_once) * view.next_row;
    };
    operands.template load<kAligned>(has, offset, views...);
    operands.use(kAligned, 0, has, offset, body, views...);
  }
}

template <class T, int M, class Body, class... Views>
APEX_DEVICE void packs_of_runs(bool aligned, int64_t column, int first, int at_once, int64_t count,
                               const Body& body, const Views&... views) {
  if (aligned) {
    walk_runs<T, true, M>(column, first, at_once, count, body, views...);
  } else {
    walk_runs<T, false, M>(column, first, at_once, count, body, views...);
  }
}

// What a thread of a row adds up of M vectors [count].
template <class T, int M>
APEX_DEVICE Array<double, M> sums_of_thread(int count, const Array<const T*, M>& vectors) {
  constexpr int kUnderWay = kRowLoads / M;
  const int threads = blockDim.x;
  Array<double, M> total{};
#pragma unroll 1
  for (int first = threadIdx.x; first < count; first += kUnderWay * threads) {
    T own[kUnderWay][M];
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      for (int m = 0; m < M; ++m) own[u][m] = vectors[m][min(first + u * threads, count - 1)];
    }
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      const bool has = first + u * threads < count;
      for (int m = 0; m < M; ++m) total[m] += has ? static_cast<double>(own[u][m]) : 0.0;
    }
  }
  return total;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
