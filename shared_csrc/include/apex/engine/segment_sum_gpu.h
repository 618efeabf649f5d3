// Sums over segments on a GPU: a thread takes a segment's pack of columns and walks its rows.
#pragma once

#include "apex/engine/packs_gpu.h"
#include "apex/engine/segment_sort_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// A thread's sums of one column number, for its pack of columns.
template <class T, int kSums>
struct SumView {
  using storage = T;
  static constexpr bool kRead = true, kWritten = false;
  const Array<T, kSums>* sums;  // [pack]
  int index;
};

// Of a row, the pack of columns from `column` on. `segment` is -1 where it has none.
struct PackOfRow {
  int64_t columns, column, segment, other;
};

// Of memory that the kernel does not write: loads need not wait for stores before them.
template <int N, class S>
APEX_DEVICE StoredPack<S, N> load_constant(const S* from) {
  StoredPack<S, N> pack;
#if defined(__CUDA_ARCH__)
  // Compilers may move such loads before wait_for_kernels_before() has ended.
  if constexpr (sizeof(pack) % 16 == 0 && !kDependentLaunches) {
    const int4* words = reinterpret_cast<const int4*>(from);
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / 16; ++i) {
      const int4 word = __ldg(words + i);
      memcpy(pack.words + 4 * i, &word, sizeof(word));
    }
    return pack;
  }
#endif
  pack.template load<true>(from);
  return pack;
}

// What a row does with packs: asks whether all may be moved as a whole, or moves them.
enum class PackWay { kAsked, kWhole, kElements };

// What a program sees of a row, or finish() of a segment: a pack of columns.
template <PackWay kPacks, class T, int kSums, int N>
class SegmentRow {
 public:
  APEX_DEVICE SegmentRow(const PackOfRow& at, Array<T, kSums>* sums)
      : at_(at),
        count_(static_cast<int>(min(at.columns - at.column, static_cast<int64_t>(N)))),
        is_whole_(count_ == N),
        sums_(sums) {}

  // The same row, of which other packs are moved.
  template <PackWay kOthers>
  APEX_DEVICE SegmentRow<kOthers, T, kSums, N> as() const {
    return {at_, sums_};
  }

  // `place` is that among the sorted rows, or those of a segment.
  APEX_DEVICE void move_to(int64_t index, int64_t place) {
    index_ = index;
    place_ = place;
  }
  APEX_DEVICE int64_t index() const { return index_; }
  APEX_DEVICE int64_t place() const { return place_; }
  APEX_DEVICE int64_t segment() const { return at_.segment; }
  APEX_DEVICE int64_t later_segment() const { return at_.segment; }
  APEX_DEVICE int64_t other() const { return at_.other; }
  APEX_DEVICE int64_t columns() const { return at_.columns; }
  APEX_DEVICE bool is_whole() const { return is_whole_; }

  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix) const {
    return in(matrix, at_.columns);
  }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix) const {
    return out(matrix, at_.columns);
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  APEX_DEVICE ReadView<S> from(const S* address, int64_t = 0) const {
    return {address};
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
    auto add = [&](int lane, auto&... values) { functor(sums_[lane], values...); };
    pass(std::index_sequence_for<Views...>{}, add, views...);
  }

  template <class F, class... Views>
  APEX_DEVICE void each(const F& functor, const Views&... views) {
    auto call = [&](int, auto&... values) { functor(values...); };
    pass(std::index_sequence_for<Views...>{}, call, views...);
  }

 private:
  template <class S>
  APEX_DEVICE void fetch(const ReadView<S>& view, T (&into)[N]) const {
    if constexpr (kPacks == PackWay::kWhole) {
      load_constant<N>(view.data + at_.column).values(into);
    } else {
      load_some(view.data + at_.column, into, count_);
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
    if constexpr (View::kWritten && kPacks == PackWay::kWhole) {
      store_pack(view.data + at_.column, values);
    } else if constexpr (View::kWritten) {
      store_some(view.data + at_.column, values, count_);
    }
  }
  APEX_DEVICE static bool aligned(const SumView<T, kSums>&) { return true; }
  template <class View>
  APEX_DEVICE static bool aligned(const View& view) {
    return is_aligned<N>(view.data);
  }

  // body(lane, T& value0, ...) for every column of the pack; those behind the last get zeros.
  template <size_t... I, class Body, class... Views>
  APEX_DEVICE void pass(std::index_sequence<I...>, const Body& body, const Views&... views) {
    if constexpr (kPacks == PackWay::kAsked) {
      is_whole_ = is_whole_ && (aligned(views) && ...);
    } else {
      T values[sizeof...(Views)][N];
      (fetch(views, values[I]), ...);
#pragma unroll
      for (int lane = 0; lane < N; ++lane) body(lane, values[I][lane]...);
      (put(views, values[I]), ...);
    }
  }

  PackOfRow at_;
  int64_t index_ = 0, place_ = 0;
  int count_;
  bool is_whole_;
  Array<T, kSums>* sums_;  // [N]
};

template <class P>
inline constexpr int kSegmentPack = pack_size<typename P::storage_type>();

template <class P>
using SegmentRowOf = SegmentRow<PackWay::kAsked, typename P::value_type, P::kSums, kSegmentPack<P>>;

template <class P>
using SegmentSums = Array<typename P::value_type, P::kSums>;

template <class P>
concept SegmentProgram =
    PlainProgram<P> &&
    requires(const P& program, SegmentRowOf<P>& row,
             const Array<SumView<typename P::value_type, P::kSums>, P::kSums>& sums) {
      program.column_sums(row);
      program.finish(row, sums);
    };

// body(row), which moves packs as a whole where all may be: a question for each of them would make
// loads wait for one another.
template <class R, class Body>
APEX_DEVICE void with_packs(R row, const Body& body) {
  body(row);
  if (row.is_whole()) {
    auto whole = row.template as<PackWay::kWhole>();
    body(whole);
  } else {
    auto elements = row.template as<PackWay::kElements>();
    body(elements);
  }
}

template <class T, int kSums, int N>
APEX_DEVICE void add_sums(Array<T, kSums> (&sums)[N], const Array<T, kSums>* others) {
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    for (int n = 0; n < kSums; ++n) sums[lane][n] += others[lane][n];
  }
}

// Sorted rows from `place` on: all are loaded before what row() writes.
template <bool kRows, int K, class Program, class R>
APEX_DEVICE void visit(const Program& program, const int64_t (&indices)[K], int64_t place, R& row) {
#pragma unroll
  for (int i = 0; i < K; ++i) {
    row.move_to(indices[i], place + i);
    program.column_sums(row);
  }
  if constexpr (kRows) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      row.move_to(indices[i], place + i);
      program.row(row);
    }
  }
}

// Adds a part to `sums`, run by run: several rows at once, then those that are left.
template <bool kRows, class Program, class Part>
APEX_DEVICE void add_part(const Program& program, const Part& part, const PackOfRow& at,
                          SegmentSums<Program> (&sums)[kSegmentPack<Program>]) {
  constexpr int N = kSegmentPack<Program>;
  for (int64_t place = part.begin; place < part.end;) {
    const int64_t end = min(place + Part::kRun, part.end);
    SegmentSums<Program> run[N] = {};
    const SegmentRowOf<Program> row(at, run);
    for (; place + kSegmentRows <= end; place += kSegmentRows) {
      int64_t indices[kSegmentRows];
      part.rows(place, indices);
      auto asked = row;
      visit<kRows>(program, indices, place, asked);
      if (!asked.is_whole()) break;
      auto whole = row.template as<PackWay::kWhole>();
      visit<kRows>(program, indices, place, whole);
    }
    for (; place < end; ++place) {
      int64_t index[1];
      part.rows(place, index);
      with_packs(row, [&](auto& moved) { visit<kRows>(program, index, place, moved); });
    }
    add_sums(sums, run);
  }
}

// heads, [heads, packs, pack]: sums of what long segments have beyond their first part.
template <bool kRows, class Grouped, class Program>
__global__ void APEX_LAUNCH_BOUNDS(kSegmentThreads, kSegmentResidentBlocks)
    segment_heads(Grouped segments, int64_t columns, SegmentSums<Program>* heads, Program program) {
  wait_for_kernels_before();
  constexpr int N = kSegmentPack<Program>;
  const int64_t packs = (columns + N - 1) / N;
  for (int64_t i = first_of_thread(); i < segments.heads * packs; i += all_threads()) {
    int64_t pack;
    const auto part = segments.head(divide(i, packs, pack));
    if (part.begin == part.end) continue;
    SegmentSums<Program> sums[N] = {};
    const int64_t segment = part.segment < segments.count ? part.segment : -1;
    add_part<kRows>(program, part, {columns, pack * N, segment, part.other}, sums);
    for (int lane = 0; lane < N; ++lane) heads[i * N + lane] = sums[lane];
  }
  segments.find_offsets();
}

// kRows: the program's row() too, also for rows of no segment.
template <bool kRows, class Grouped, class Program>
__global__ void APEX_LAUNCH_BOUNDS(kSegmentThreads, kSegmentResidentBlocks)
    segment_sums(Grouped segments, int64_t columns, const SegmentSums<Program>* heads,
                 Program program) {
  wait_for_kernels_before();
  using T = typename Program::value_type;
  constexpr int N = kSegmentPack<Program>, kSums = Program::kSums;
  const int64_t packs = (columns + N - 1) / N;
  const int64_t all = (segments.count + (kRows ? 1 : 0)) * packs;
  for (int64_t i = first_of_thread(); i < all; i += all_threads()) {
    int64_t pack;
    const auto part = segments.first(divide(i, packs, pack));
    const bool is_none = kRows && part.segment == segments.count;
    SegmentSums<Program> sums[N] = {};
    const PackOfRow at{columns, pack * N, is_none ? -1 : part.segment, part.other};
    add_part<kRows>(program, part, at, sums);
    if (is_none) continue;
    for (int64_t k = part.head; k < part.last_head; ++k) {
      add_sums(sums, heads + (k * packs + pack) * N);
    }
    Array<SumView<T, kSums>, kSums> results;
    for (int n = 0; n < kSums; ++n) results[n] = {sums, n};
    with_packs(SegmentRowOf<Program>(at, sums), [&](auto& moved) {
      moved.move_to(part.segment, 0);
      program.finish(moved, results);
    });
  }
}

template <bool kRows, class Context, class Grouped, class Program>
void run_segment_sum(const Context& context, const Grouped& segments, int64_t columns,
                     const Program& program) {
  const int64_t count = segments.count + (kRows ? 1 : 0);
  if (count == 0 || columns == 0) return;
  constexpr int N = kSegmentPack<Program>;
  const int64_t packs = (columns + N - 1) / N;
  SegmentSums<Program>* heads = nullptr;
  const dim3 block(kSegmentThreads);
  if (segments.heads > 0 || !segments.has_offsets) {
    heads = static_cast<SegmentSums<Program>*>(
        context.workspace((segments.heads * packs * N + 1) * sizeof(*heads)));
    const int64_t offsets = segments.has_offsets ? 0 : segments.count + 1;
    launch<segment_heads<kRows, Grouped, Program>>(
        blocks_for(std::max(segments.heads * packs, offsets)), block, 0, context.stream(), segments,
        columns, heads, program);
    context.check_launch("segment_heads");
  }
  launch<segment_sums<kRows, Grouped, Program>>(
      blocks_for(count * packs), block, 0, context.stream(), segments, columns, heads, program);
  context.check_launch("segment_sums");
}

template <class Context, SegmentProgram Program>
void segment_sum(const Context& context, const Segments& segments, int64_t columns,
                 const Program& program) {
  run_segment_sum<false>(context, segments, columns, program);
}

// In one pass over the sorted rows.
template <class Context, SegmentProgram Program>
void rowwise_segment_sum(const Context& context, const Segments& segments, int64_t columns,
                         const Program& program) {
  run_segment_sum<true>(context, segments, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
