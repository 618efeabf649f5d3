// What a row program sees of its row on a GPU, which several threads share.
#pragma once

#include <limits>
#include <utility>

#include "apex/core/gpu.h"
#include "apex/engine/packs_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// N: elements of a pack that is kept. kPacks: packs of a thread. kKept: whether those are the whole
// row. kSums: numbers that the threads add up for each of their columns.
template <class T, int N = 16 / sizeof(T), int kPacks = kRowPacks, bool kKept = true, int kSums = 0>
class Row {
  template <class S>
  using Staged = std::conditional_t<kKept, KeptView<S, N, kPacks>, ReadView<S>>;
  using Column = std::conditional_t<kKept, int, int64_t>;

 public:
  // `phase` is 0 or 1, and shared by the rows that a thread makes of this one.
  APEX_DEVICE Row(int64_t columns, int* phase)
      : width_(static_cast<Column>(columns)), end_(width_), phase_(phase) {}

  APEX_DEVICE void move_to(int64_t index) { index_ = index; }
  APEX_DEVICE int64_t index() const { return index_; }
  APEX_DEVICE int64_t columns() const { return end_ - begin_; }

  // Views of a window begin where the row does, so that its packs are those of the row.
  APEX_DEVICE Row within(int64_t begin, int64_t end) const {
    Row window = *this;
    window.begin_ = begin_ + static_cast<Column>(begin);
    window.end_ = begin_ + static_cast<Column>(end);
    return window;
  }

  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix) const {
    return in(matrix, width_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix) const {
    return out(matrix, width_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> from(const S* address, int64_t next = 0) const {
    return {address, next};
  }
  template <class S>
  APEX_DEVICE WriteView<S> to(S* address, int64_t next = 0) const {
    return {address, next};
  }
  template <class S>
  APEX_DEVICE SharedView<S> shared(const S* vector) const {
    return {{vector}};
  }

  template <class Numbers>
  APEX_DEVICE GeneratedView<Numbers> generated(const Numbers& numbers) const {
    return generated_view(numbers, index_, width_);
  }

  template <class View>
  APEX_DEVICE View ahead(const View& view) const {
    return view;
  }

  template <class S>
  APEX_DEVICE Staged<S> stage(const S* matrix) const {
    Staged<S> view{in(matrix).data};
    if constexpr (kKept) {
      static_assert(sizeof(S) == 1 || pack_size<S>() <= N,
                    "staged_type must be the narrowest that is staged, but for bytes");
      if (view_aligned<N>(in(matrix))) {
        load<true>(view);
      } else {
        load<false>(view);
      }
    }
    return view;
  }

  // What `each` writes to `matrix`, staged as it is rounded.
  template <class S, class F, class... Views>
  APEX_DEVICE Staged<S> stage_result(S* matrix, const F& functor, const Views&... views) const {
    Staged<S> view{out(matrix).data};
    if constexpr (kKept) {
      auto keep = [&](int pack, int lane, T& result, const auto&... values) {
        functor(result, values...);
        if (pack != kNoPack) view.packs[pack].set(lane, convert<S>(result));
      };
      pass<N>(keep, out(matrix), views...);
    } else {
      each(functor, out(matrix), views...);
    }
    sync();  // pivot() reads what another thread wrote
    return view;
  }

  template <class F, class... Views>
  APEX_DEVICE T sum(const F& functor, const Views&... views) const {
    return sums<1>([&](auto&... values) { return Array<T, 1>{{functor(values...)}}; }, views...)[0];
  }

  template <int M, class F, class... Views>
  APEX_DEVICE Array<T, M> sums(const F& functor, const Views&... views) const {
    return sums_of<M>([&](int, int, auto&... values) { return functor(values...); }, views...);
  }

  // use(sum of term(values...), each_term), where each_term(functor, others...) is an each() whose
  // functor gets numbers of one view or three, and behind them the term.
  template <class F, class Use, class... Views>
  APEX_DEVICE void with_terms(const F& term, const Use& use, const Views&... views) const {
    T kept[kKept ? kPacks : 1][N];
    auto keep = [&](int pack, int lane, const auto&... values) {
      const T own = term(values...);
      if constexpr (kKept) {
        static_assert(pack_of<Views...>() == N, "with_terms() needs a view that is staged");
        if (pack != kNoPack) kept[pack][lane] = own;
      }
      return Array<T, 1>{{own}};
    };
    auto again = [&](int pack, int lane, const auto&... values) {
      if constexpr (kKept) {
        if (pack != kNoPack) return kept[pack][lane];
      }
      return term(values...);
    };
    use(sums_of<1>(keep, views...)[0], [&](const auto& functor, const auto&... others) {
      if constexpr (sizeof...(others) == 1) {
        auto of_one = [&](int pack, int lane, T& a, const auto&... values) {
          functor(a, again(pack, lane, values...));
        };
        pass<pack_of<Views...>(), !kKept>(of_one, others..., views...);
      } else {
        static_assert(sizeof...(others) == 3);
        auto of_three = [&](int pack, int lane, T& a, T& b, T& c, const auto&... values) {
          functor(a, b, c, again(pack, lane, values...));
        };
        pass<pack_of<Views...>(), !kKept>(of_three, others..., views...);
      }
    });
  }

  // sums(), and where the threads have sums of columns, of_column(sums, values...) for each.
  template <int M, int kOfColumns, class F, class C, class... Views>
  APEX_DEVICE Array<T, M> sums_and_columns(const F& functor, const C& of_column,
                                           const Views&... views) const {
    if constexpr (kSums == 0) {
      return sums<M>(functor, views...);
    } else {
      static_assert(kOfColumns == kSums && pack_of<Views...>() == N);
      auto both = [&](int pack, int lane, auto&... values) {
        if (pack != kNoPack) of_column(column_sums_[pack][lane], values...);
        return functor(values...);
      };
      return sums_of<M>(both, views...);
    }
  }

  // A number near the row's mean, as on the CPU: here of its first columns that one load brings.
  template <class View>
  APEX_DEVICE T pivot(const View& view) const {
    constexpr int kFirst = 4;
    const auto* first = view.data + begin_;
    if (columns() < kFirst) return columns() == 0 ? T(0) : convert<T>(first[0]);
    T values[kFirst];
    if (is_aligned<kFirst>(first)) {
      load_pack(first, values);
    } else {
      load_some(first, values, kFirst);
    }
    return (values[0] + values[1] + values[2] + values[3]) / T(kFirst);
  }

  template <class F, class... Views>
  APEX_DEVICE T max(const F& functor, const Views&... views) const {
    T largest = -std::numeric_limits<T>::infinity();
    pass([&](int, int, auto&... values) { largest = larger(functor(values...), largest); },
         views...);
    return reduce(largest, Max{});
  }

  // Several states a thread: a functor need not wait for the number before.
  template <int M, class F, class Merge, class... Views>
  APEX_DEVICE Array<T, M> fold(const Array<T, M>& empty, const F& functor, const Merge& merge,
                               const Views&... views) const {
    constexpr int kStates = pack_of<Views...>() < 4 ? 2 : 4;
    Array<T, M> states[kStates];
#pragma unroll
    for (int i = 0; i < kStates; ++i) states[i] = empty;
    pass([&](int, int lane, auto&... values) { functor(states[lane % kStates], values...); },
         views...);
#pragma unroll
    for (int step = kStates / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < step; ++i) states[i] = merge(states[i], states[i + step]);
    }
    return reduce(states[0], merge);
  }

  template <class F, class... Views>
  APEX_DEVICE void each(const F& functor, const Views&... views) const {
    pass<pack_of<Views...>(), true>([&](int, int, auto&... values) { functor(values...); },
                                    views...);
  }

  // A thread has the same columns of several runs under way.
  template <class F, class... Views>
  APEX_DEVICE void each_of(int64_t count, const F& functor, const Views&... views) const {
    runs_of(count, [&](int, int, auto&... values) { functor(values...); }, fixed(views)...);
  }

  // By the thread that had this column in `each`, so that no barrier is needed between them.
  template <class F, class... Views>
  APEX_DEVICE void at(int64_t column, const F& functor, const Views&... views) const {
    constexpr int M = pack_of<Views...>();
    const bool aligned = (view_aligned<M>(views) && ...);
    if (aligned ? !is_own<M>(begin_ + column) : !is_own_single(begin_ + column)) return;
    single([&](int, int, auto&... values) { functor(values...); }, begin_ + column, views...);
  }

  template <class F>
  APEX_DEVICE void once(const F& f) const {
    if (threadIdx.x == 0) f();
  }

  // Sums of M vectors [count], in all threads of the row.
  template <int M>
  APEX_DEVICE Array<double, M> sum_vectors(int count, const Array<const T*, M>& vectors) const {
    return reduce(sums_of_thread(count, vectors), Add{});
  }

  // Writes the sums of the block's columns to partials [kSums, columns]. `exchange` has N numbers
  // for each thread.
  APEX_DEVICE void store_columns(T* partials, T* exchange) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const Column column = first_column<N>() + pack * kStep<N>;
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        T values[N];
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = column_sums_[pack][i][n];
        if (blockDim.y > 1) add_rows_of_threads(values, exchange);
        if (threadIdx.y == 0 && column < end_) {
          store_pack(partials + n * static_cast<int64_t>(end_) + column, values);
        }
      }
    }
  }

 private:
  APEX_DEVICE void sync() const {
    if (blockDim.x <= kGroupLanes) {
      sync_group();
    } else {
      __syncthreads();
    }
  }

  // A group of lanes has kPacks times its lanes packs side by side, so that the distance of two of
  // a thread is known to compilers: addresses take registers.
  template <int M>
  static constexpr int kStep = kGroupLanes * M;

  template <int M>
  APEX_DEVICE static Column first_column() {
    const int thread = threadIdx.x;
    if constexpr (kPacks == 1) return thread * M;
    return (thread / kGroupLanes * kGroupLanes * kPacks + thread % kGroupLanes) * M;
  }

  // Threads and packs are powers of two.
  template <int M>
  APEX_DEVICE static bool is_own(Column column) {
    const Column pack = column / M;
    const Column thread =
        kPacks == 1 ? pack : pack / (kGroupLanes * kPacks) * kGroupLanes + pack % kGroupLanes;
    return (thread & (blockDim.x - 1)) == threadIdx.x;
  }

  APEX_DEVICE static bool is_own_single(Column column) {
    return (column & (blockDim.x - 1)) == threadIdx.x;
  }

  // Whether a pack, counted from that of a column, is whole; and where.
  template <int M>
  APEX_DEVICE bool has(Column own, int pack) const {
    return own + pack * kStep<M> >= begin_ && own + pack * kStep<M> + M <= end_;
  }
  template <int M>
  APEX_DEVICE static int64_t at_pack(Column own, int pack) {
    return static_cast<int64_t>(own) + pack * kStep<M>;
  }

  template <bool kAligned, class S>
  APEX_DEVICE void load(KeptView<S, N, kPacks>& view) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (!has<N>(first_column<N>(), pack)) continue;
      view.packs[pack].template load<kAligned>(view.data + at_pack<N>(first_column<N>(), pack));
    }
  }

  // Sums in two stages: were each term added to the total, a large one would swallow the digits of
  // all that follow. A thread's packs that are under way together are a part.
  template <int M, class F, class... Views>
  APEX_DEVICE Array<T, M> sums_of(const F& functor, const Views&... views) const {
    Array<T, M> totals{}, part{};
    auto add_part = [&] {
#pragma unroll
      for (int m = 0; m < M; ++m) totals[m] += part[m];
    };
    auto add = [&](int pack, int lane, auto&... values) {
      if (pack <= 0 && lane == 0) {
        add_part();
        part = {};
      }
      const Array<T, M> terms = functor(pack, lane, values...);
#pragma unroll
      for (int m = 0; m < M; ++m) part[m] += terms[m];
    };
    pass<pack_of<Views...>()>(add, views...);
    add_part();
    return reduce(totals, Add{});
  }

  // The reduction over the row's threads, in all of them. With one pack a thread, rows are of part
  // of a group, else of whole groups: masks that compilers know make a shuffle one instruction.
  template <class V, class Op>
  APEX_DEVICE V reduce(V value, const Op& op) const {
    if constexpr (kPacks == 1) return reduce_group(value, op);
    value = reduce_lanes(value, op, kGroupLanes);
    if (blockDim.x == kGroupLanes) return value;
    constexpr int kMostGroups = kRowThreads / kGroupLanes;
    APEX_SHARED(V, partials, [2][kMostGroups]);
    const int groups = blockDim.x / kGroupLanes, lane = threadIdx.x % kGroupLanes;
    V* own = partials[*phase_];
    if (lane == 0) own[threadIdx.x / kGroupLanes] = value;
    __syncthreads();
    // No barrier behind: the next reduction writes to the other ones.
    *phase_ ^= 1;
    return reduce_lanes(own[lane & (groups - 1)], op, groups);
  }

  template <class Body, class... Views>
  APEX_DEVICE void pass(const Body& body, const Views&... views) const {
    pass<pack_of<Views...>()>(body, views...);
  }

  // body(pack, lane, values...) for every element of this thread, of the same ones wherever the row
  // lies, so that sums have the same bits; but for kAnyOrder, where that does not matter.
  template <int M, bool kAnyOrder = false, class Body, class... Views>
  APEX_DEVICE void pass(const Body& body, const Views&... views) const {
    constexpr int kUnderWay = packs_under_way<M, kPacks, Views...>();
    constexpr bool kOneTurn = kKept && M == N;
    const bool aligned = (view_aligned<M>(views) && ...);
    if constexpr (kAnyOrder && (kept_pack_v<Views> + ...) == 0) {
      if (!aligned) return singles(body, views...);
    }
    const Column turn = static_cast<Column>(blockDim.x) * (M * kPacks);
#pragma unroll 1
    for (Column begin = kOneTurn ? 0 : begin_ & -turn; begin < end_; begin += turn) {
      const Column own = begin + first_column<M>();
#pragma unroll
      for (int first = 0; first < kPacks; first += kUnderWay) {
        auto is_whole = [&](int u) { return has<M>(own, first + u); };
        auto offset = [&](const auto&, int u) { return at_pack<M>(own, first + u); };
        auto of_pack = [&](int u, int lane, auto&... values) { body(first + u, lane, values...); };
        Operands<T, M, kUnderWay, std::index_sequence_for<Views...>, Views...> operands;
        operands.run(aligned, first, is_whole, offset, of_pack, views...);
      }
      if constexpr (kOneTurn) break;
    }
    if ((begin_ | end_) & (M - 1)) rest<M>(body, views...);
  }

  // Single elements of rows that are not aligned: of neighbours by neighbours, so that 32 bytes of
  // memory are written at once.
  template <class Body, class... Views>
  APEX_DEVICE void singles(const Body& body, const Views&... views) const {
    constexpr int kUnderWay = 4;
    const Column threads = blockDim.x;
#pragma unroll 1
    for (Column own = (begin_ & -threads) + threadIdx.x; own < end_; own += threads * kUnderWay) {
      Operands<T, 1, kUnderWay, std::index_sequence_for<Views...>, Views...> operands;
      operands.run(
          true, 0, [&](int u) { return own + u * threads >= begin_ && own + u * threads < end_; },
          [&](const auto&, int u) { return static_cast<int64_t>(own + u * threads); },
          [&](int, int lane, auto&... values) { body(kNoPack, lane, values...); }, views...);
    }
  }

  // What fills no pack, at either end.
  template <int M, class Body, class... Views>
  APEX_DEVICE void rest(const Body& body, const Views&... views) const {
    const Column head = min((begin_ + M - 1) & -M, end_);
    const Column tail = (end_ & -M) > head ? end_ & -M : head;
#pragma unroll 1
    for (int edge = 0; edge < 2; ++edge) {
      const Column from = edge == 0 ? begin_ : tail, to = edge == 0 ? head : end_;
      if (from == to || !is_own<M>(from)) continue;
#pragma unroll 1
      for (Column column = from; column < to; ++column) single(body, column, views...);
    }
  }

  template <class Body, class... Views>
  APEX_DEVICE void single(const Body& body, int64_t column, const Views&... views) const {
    Operands<T, 1, 1, std::index_sequence_for<Views...>, Views...> operands;
    operands.load_fixed(true, column, views...);
    operands.run(
        true, 0, [](int) { return true; }, [&](const auto&, int) { return column; },
        [&](int, int lane, auto&... values) { body(kNoPack, lane, values...); }, views...);
  }

  // Where a run is narrower than the row's threads, these share out the runs.
  template <class Body, class... Views>
  APEX_DEVICE void runs_of(int64_t count, const Body& body, const Views&... views) const {
    constexpr int M = pack_of<Views...>();
    const bool aligned = begin_ % M == 0 && (is_aligned_of_runs<M>(views) && ...);
    int lanes = 1;
    while (lanes < blockDim.x && static_cast<int64_t>(lanes) * M < end_ - begin_) lanes *= 2;
    const int lane_of_run = threadIdx.x & (lanes - 1), at_once = blockDim.x / lanes;
    const int first = threadIdx.x / lanes;
#pragma unroll 1
    for (int64_t column = begin_ + lane_of_run * M; column < end_; column += lanes * M) {
      if (column + M <= end_) {
        if constexpr (kHasOneResult<Views...>) {
          packs_of_runs<T, M>(aligned, column, first, at_once, count, body, views...);
          continue;
        }
        constexpr int kUnderWay = packs_under_way<M, kPacks, Views...>();
        Operands<T, M, kUnderWay, std::index_sequence_for<Views...>, Views...> operands;
        operands.load_fixed(aligned, column, views...);
#pragma unroll 1
        for (int64_t run = first; run < count; run += at_once * kUnderWay) {
          auto has = [&](int u) { return run + u * at_once < count; };
          auto offset = [&](const auto& view, int u) {
            return column + (run + u * at_once) * view.next_row;
          };
          operands.run(aligned, 0, has, offset, body, views...);
        }
        continue;
      }
#pragma unroll 1
      for (int64_t run = first; run < count; run += at_once) {
#pragma unroll 1
        for (int64_t rest = column; rest < end_; ++rest) {
          single(body, rest, moved(views, run)...);
        }
      }
    }
  }

  template <int M, class View>
  APEX_DEVICE static bool is_aligned_of_runs(const View& view) {
    return view_aligned<M>(view) && is_aligned<M>(view.data + view.next_row);
  }

  template <class View>
  APEX_DEVICE static View moved(View view, int64_t run) {
    view.data += run * view.next_row;
    return view;
  }

  // Adds up what the block's rows of threads have, in their order: those of threadIdx.y == 0 get
  // it.
  APEX_DEVICE void add_rows_of_threads(T (&values)[N], T* exchange) const {
    T* own = exchange + (threadIdx.y * blockDim.x + threadIdx.x) * N;
    __syncthreads();  // what was there is no longer read
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = values[i];
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (unsigned y = 1; y < blockDim.y; ++y) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += own[y * blockDim.x * N + i];
    }
  }

  int64_t index_ = 0;
  Column width_, begin_ = 0, end_;  // of the operands, and of the window that is seen
  int* phase_;                      // which of two buffers the next reduction takes
  mutable Array<T, kSums ? kSums : 1> column_sums_[kSums ? kPacks : 1][kSums ? N : 1] = {};
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
