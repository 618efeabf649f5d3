// Sums over segments on a GPU: a thread takes a segment's pack of columns and walks its rows.
#pragma once

#include "apex/engine/segment_sort_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Sorted rows after which a run of additions ends, as on the CPU; here it bounds what one thread
// adds up of a long segment.
inline constexpr int64_t kSegmentTile = 128;

// A thread's sums of one column number, for its pack of columns.
template <class T, int kSums>
struct SumView {
  using storage = T;
  static constexpr bool kRead = true, kWritten = false;
  const Array<T, kSums>* sums;  // [pack]
  int index;
};

// What a program sees of a row, or finish() of a segment: a pack of columns.
template <class T, int kSums, int N>
class SegmentRow {
 public:
  APEX_DEVICE SegmentRow(int64_t columns, int64_t column)
      : columns_(columns),
        column_(column),
        count_(static_cast<int>(min(columns - column, static_cast<int64_t>(N)))) {}

  APEX_DEVICE void move_to(int64_t index) { index_ = index; }
  APEX_DEVICE int64_t index() const { return index_; }
  APEX_DEVICE int64_t columns() const { return columns_; }

  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix) const {
    return in(matrix, columns_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix) const {
    return out(matrix, columns_);
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE ReadView<S> shared(const S* vector) const {
    return {vector};
  }
  template <class View>
  APEX_DEVICE View ahead(const View& view) const {
    return view;
  }

  template <int M, class F, class... Views>
  APEX_DEVICE void accumulate(const F& functor, const Views&... views) {
    static_assert(M == kSums, "accumulate<N> must use the program's kSums");
    auto add = [&](int lane, auto&... values) { functor(sums[lane], values...); };
    pass(std::index_sequence_for<Views...>{}, add, views...);
  }

  template <class F, class... Views>
  APEX_DEVICE void each(const F& functor, const Views&... views) const {
    auto call = [&](int, auto&... values) { functor(values...); };
    pass(std::index_sequence_for<Views...>{}, call, views...);
  }

  Array<T, kSums> sums[N] = {};

 private:
  template <class S>
  APEX_DEVICE void fetch(const ReadView<S>& view, T (&into)[N]) const {
    if (count_ == N && is_aligned<N>(view.data)) {
      load_pack(view.data + column_, into);
    } else {
      load_some(view.data + column_, into, count_);
    }
  }
  APEX_DEVICE void fetch(const SumView<T, kSums>& view, T (&into)[N]) const {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) into[lane] = view.sums[lane][view.index];
  }
  template <class S>
  APEX_DEVICE void fetch(const WriteView<S>&, T (&into)[N]) const {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) into[lane] = T(0);
  }
  template <class View>
  APEX_DEVICE void put(const View& view, const T (&values)[N]) const {
    if constexpr (View::kWritten) {
      if (count_ == N && is_aligned<N>(view.data)) {
        store_pack(view.data + column_, values);
      } else {
        store_some(view.data + column_, values, count_);
      }
    }
  }

  // body(lane, T& value0, ...) for every column of the pack; those behind the last get zeros.
  template <size_t... I, class Body, class... Views>
  APEX_DEVICE void pass(std::index_sequence<I...>, const Body& body, const Views&... views) const {
    T values[sizeof...(Views)][N];
    (fetch(views, values[I]), ...);
#pragma unroll
    for (int lane = 0; lane < N; ++lane) body(lane, values[I][lane]...);
    (put(views, values[I]), ...);
  }

  int64_t index_ = 0, columns_, column_;
  int count_;
};

template <class P>
inline constexpr int kSegmentPack = pack_size<typename P::storage_type>();

template <class P>
using SegmentRowOf = SegmentRow<typename P::value_type, P::kSums, kSegmentPack<P>>;

template <class P>
concept SegmentProgram =
    PlainProgram<P> &&
    requires(const P& program, SegmentRowOf<P>& row,
             const Array<SumView<typename P::value_type, P::kSums>, P::kSums>& sums) {
      program.column_sums(row);
      program.finish(row, sums);
    };

// Adds sorted rows [begin, end) to the row's sums.
template <class Program, class R>
APEX_DEVICE void add_rows(const Program& program, const int64_t* order, int64_t begin, int64_t end,
                          R& row) {
  for (int64_t place = begin; place < end; ++place) {
    row.move_to(order[place]);
    program.column_sums(row);
  }
}

// heads, [tiles, packs, pack]: of every tile, the sums of what belongs to a segment that began
// before it.
template <class Program>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_heads(Segments segments, int64_t tiles, int64_t columns,
                  Array<typename Program::value_type, Program::kSums>* heads, Program program) {
  constexpr int N = kSegmentPack<Program>;
  const int64_t packs = (columns + N - 1) / N;
  const int64_t* offsets = segments.offsets;
  for (int64_t i = packs + first_of_thread(); i < tiles * packs; i += all_threads()) {
    const int64_t tile = i / packs, begin = tile * kSegmentTile;
    // The first segment that ends behind `begin`.
    int64_t low = 0, high = segments.count;
    while (low < high) {
      int64_t middle = low + (high - low) / 2;
      if (offsets[middle + 1] <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == segments.count || offsets[low] == begin) continue;
    SegmentRowOf<Program> row(columns, (i - tile * packs) * N);
    add_rows(program, segments.order, begin, min(offsets[low + 1], begin + kSegmentTile), row);
    for (int lane = 0; lane < N; ++lane) heads[i * N + lane] = row.sums[lane];
  }
}

template <class Program>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_sums(Segments segments, int64_t columns,
                 const Array<typename Program::value_type, Program::kSums>* heads,
                 Program program) {
  using T = typename Program::value_type;
  constexpr int N = kSegmentPack<Program>, kSums = Program::kSums;
  const int64_t packs = (columns + N - 1) / N;
  for (int64_t i = first_of_thread(); i < segments.count * packs; i += all_threads()) {
    const int64_t segment = i / packs, pack = i - segment * packs;
    const int64_t begin = segments.offsets[segment], end = segments.offsets[segment + 1];
    int64_t tile = begin / kSegmentTile + 1;  // the next
    SegmentRowOf<Program> row(columns, pack * N);
    add_rows(program, segments.order, begin, min(end, tile * kSegmentTile), row);
    for (; tile * kSegmentTile < end; ++tile) {
      const Array<T, kSums>* head = heads + (tile * packs + pack) * N;
#pragma unroll
      for (int lane = 0; lane < N; ++lane) {
        for (int n = 0; n < kSums; ++n) row.sums[lane][n] += head[lane][n];
      }
    }
    row.move_to(segment);
    Array<SumView<T, kSums>, kSums> sums;
    for (int n = 0; n < kSums; ++n) sums[n] = {row.sums, n};
    program.finish(row, sums);
  }
}

template <class Context, SegmentProgram Program>
void segment_sum(const Context& context, const Segments& segments, int64_t columns,
                 const Program& program) {
  using Sums = Array<typename Program::value_type, Program::kSums>;
  if (segments.count == 0 || columns == 0) return;
  constexpr int N = kSegmentPack<Program>;
  const int64_t packs = (columns + N - 1) / N;
  const int64_t tiles = (segments.rows + kSegmentTile - 1) / kSegmentTile;
  Sums* heads = nullptr;  // where one tile holds all rows, it has none
  const dim3 block(kSegmentThreads);
  if (tiles > 1) {
    heads = static_cast<Sums*>(context.workspace(tiles * packs * N * sizeof(Sums)));
    launch<segment_heads<Program>>(blocks_for((tiles - 1) * packs), block, 0, context.stream(),
                                   segments, tiles, columns, heads, program);
    context.check_launch("segment_heads");
  }
  launch<segment_sums<Program>>(blocks_for(segments.count * packs), block, 0, context.stream(),
                                segments, columns, heads, program);
  context.check_launch("segment_sums");
}

// Rows and sums have launches of their own.
template <class Context, class Program>
  requires RowProgram<Program> && SegmentProgram<Program>
void rowwise_segment_sum(const Context& context, const Segments& segments, int64_t columns,
                         const Program& program) {
  rowwise(context, segments.rows, columns, program);
  segment_sum(context, segments, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
