// Sums over segments on the CPU: a counting sort, then a segment at a time per thread. Short rows
// of small segments, and rows of few segments, are added in their own order instead.
#pragma once

#include <algorithm>
#include <utility>

#include "apex/engine/colwise_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Sorted rows after which a run of additions ends. What follows of a segment is added up by itself,
// by any thread, so that few long segments keep all threads busy.
inline constexpr int64_t kSegmentTile = 1024;

// Rows sorted by segment. Those of segment s are order[offsets[s]] to order[offsets[s + 1] - 1],
// ascending; behind the last segment's are those of none. Its memory is the context's.
struct Segments {
  int64_t rows, count;
  const int64_t* offsets;  // [count + 1]
  const int64_t* order;    // [rows]
};

// A counting sort: it takes some nanoseconds a row.
template <class Context, SegmentOfRow F>
Segments group_rows(const Context& context, int64_t rows, int64_t count, const F& segment_of) {
  // ends[s + 1] counts segment s, then says where its next row goes, and last where it ends, which
  // is where offsets[s + 1] belongs. Rows of no segment are segment `count`.
  auto* ends = static_cast<int64_t*>(context.workspace((count + 2) * sizeof(int64_t)));
  auto* order = static_cast<int64_t*>(context.workspace(rows * sizeof(int64_t)));
  auto* places = static_cast<int64_t*>(context.workspace(rows * sizeof(int64_t)));
  std::fill_n(ends, count + 2, 0);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t segment = segment_of(row);
    places[row] = (segment < 0 || segment > count ? count : segment) + 1;
    ++ends[places[row]];
  }
  for (int64_t total = 0, place = 1; place < count + 2; ++place) {
    int64_t size = ends[place];
    ends[place] = total;
    total += size;
  }
  for (int64_t row = 0; row < rows; ++row) order[ends[places[row]]++] = row;
  return {rows, count, ends, order};
}

// What a program sees of a row: as Row, but rows follow each other in the order of segments.
template <class T>
class SegmentRow : public Row<T> {
 public:
  using Row<T>::Row;

  // `later` is the row that is read some rows later; a segment is -1 where a row has none.
  void move_to(int64_t segment, int64_t index, int64_t later_segment, int64_t later) {
    Row<T>::move_to(index);
    segment_ = segment;
    later_segment_ = later_segment;
    step_ = later - index;
  }
  int64_t segment() const { return segment_; }
  int64_t later_segment() const { return later_segment_; }

  template <class S>
  ReadView<S> in(const S* matrix) const {
    return in(matrix, this->columns());
  }
  template <class S>
  ReadView<S> in(const S* matrix, int64_t stride) const {
    return this->from(matrix + this->index() * stride, step_ * stride);
  }
  template <class S>
  WriteView<S> out(S* matrix) const {
    return out(matrix, this->columns());
  }
  template <class S>
  WriteView<S> out(S* matrix, int64_t stride) const {
    WriteView<S> view = Row<T>::out(matrix, stride);
    view.next_row = step_ * stride;
    if (!view.streamed) __builtin_prefetch(view.data + view.next_row, 1, 2);
    return view;
  }

 private:
  int64_t segment_ = -1, later_segment_ = -1, step_ = 0;
};

template <class P>
concept SegmentProgram =
    PlainProgram<P> && requires(const P& program, SegmentRow<typename P::value_type>& row,
                                Row<typename P::value_type>& result,
                                const Array<ReadView<typename P::value_type>, P::kSums>& sums) {
      program.column_sums(row);
      program.finish(result, sums);
    };

// What a thread adds rows into. kRows: program.row() comes before each.
template <bool kRows, class Program>
class SegmentSums {
 public:
  using T = typename Program::value_type;
  static constexpr int N = Program::kSums;

  SegmentSums(const Program& program, const Segments& segments, int64_t columns)
      : program_(program),
        segments_(segments),
        stride_(sums_stride(columns)),
        ahead_(rows_ahead(columns)),
        block_(zero_sums<T>(N * stride_)),
        totals_(zero_sums<double>(N * stride_)),
        row_(segments.rows, columns, block_.get()),
        result_(segments.count, columns, nullptr) {}

  // Adds a segment's sorted rows [begin, end): at most kRowsPerMerge into block_, more into
  // totals_.
  void add(int64_t segment, int64_t begin, int64_t end) {
    std::fill_n(block_.get(), N * stride_, T(0));
    in_totals_ = false;
    for (int64_t place = begin; place < end; ++place) {
      if (place != begin && (place - begin) % kRowsPerMerge<Program, T> == 0) {
        row_.order_sums(N);
        merge(block_.get());
        std::fill_n(block_.get(), N * stride_, T(0));
      }
      at(segment, place);
      program_.column_sums(row_);
    }
    row_.order_sums(N);
    if (in_totals_) merge(block_.get());
  }

  // totals_ += part
  template <class P>
  void merge(const P* part) {
    double* totals = totals_.get();
    APEX_VECTORIZE
    for (int64_t i = 0; i < N * stride_; ++i) {
      totals[i] = (in_totals_ ? totals[i] : 0) + static_cast<double>(part[i]);
    }
    in_totals_ = true;
  }

  // Moves what was added to `target`, [kSums, stride].
  void take(double* target) {
    if (!in_totals_) merge(block_.get());
    std::copy_n(totals_.get(), N * stride_, target);
  }

  void finish(int64_t segment, const double* heads) {
    int64_t begin = segments_.offsets[segment], end = segments_.offsets[segment + 1];
    int64_t tile = begin / kSegmentTile + 1;  // the next
    add(segment, begin, std::min(end, tile * kSegmentTile));
    if (tile * kSegmentTile < end && !in_totals_) merge(block_.get());
    for (; tile * kSegmentTile < end; ++tile) merge(heads + tile * N * stride_);
    if (in_totals_) {
      APEX_VECTORIZE
      for (int64_t i = 0; i < N * stride_; ++i) block_[i] = static_cast<T>(totals_[i]);
    }
    result_.move_to(segment);
    Array<ReadView<T>, N> sums;
    for (int n = 0; n < N; ++n) sums[n] = {block_.get() + n * stride_};
    program_.finish(result_, sums);
  }

  // program.row() of the sorted row, where it is wanted.
  void at(int64_t segment, int64_t place) {
    const int64_t* order = segments_.order;
    const int64_t later = order[std::min(place + ahead_, segments_.rows - 1)];
    row_.move_to(segment, order[place], segment, later);
    if constexpr (kRows) program_.row(row_);
  }

 private:
  const Program& program_;
  const Segments& segments_;
  const int64_t stride_, ahead_;
  std::unique_ptr<T[], DeleteSums> block_;
  std::unique_ptr<double[], DeleteSums> totals_;
  SegmentRow<T> row_;
  Row<T> result_;
  bool in_totals_ = false;
};

template <bool kRows, class Context, SegmentProgram Program>
void run_segment_sum(const Context& context, const Segments& segments, int64_t columns,
                     const Program& program) {
  using Sums = SegmentSums<kRows, Program>;
  const int64_t *offsets = segments.offsets, stride = Sums::N * sums_stride(columns);
  const int64_t summed = offsets[segments.count];
  const int64_t tiles = (summed + kSegmentTile - 1) / kSegmentTile;
  // Of every tile, what belongs to a segment that began before it.
  auto* heads = static_cast<double*>(context.workspace(tiles * stride * sizeof(double)));
  const int64_t rows_per_grain =
      std::max<int64_t>(1, kRowwiseGrain / std::max<int64_t>(columns, 1));
  const int64_t tiles_per_grain = (rows_per_grain + kSegmentTile - 1) / kSegmentTile;
  context.parallel_for(1, tiles, tiles_per_grain, [&](int64_t first, int64_t last) {
    Sums sums(program, segments, columns);
    for (int64_t tile = first; tile < last; ++tile) {
      int64_t begin = tile * kSegmentTile;
      const int64_t* next = std::upper_bound(offsets, offsets + segments.count + 1, begin);
      if (next[-1] == begin) continue;
      sums.add(next - offsets - 1, begin, std::min(*next, begin + kSegmentTile));
      sums.take(heads + tile * stride);
    }
    finish_streams();
  });
  // Threads have equal shares of rows and segments together. Behind the last segment's rows are
  // those of no segment.
  const int64_t work = segments.rows + segments.count;
  const int64_t parts = std::clamp<int64_t>(work / rows_per_grain, 1, context.threads());
  auto segment_at = [&](int64_t part) {
    int64_t low = 0, high = segments.count, wanted = work * part / parts;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      (offsets[middle] + middle < wanted ? low : high) =
          middle + (offsets[middle] + middle < wanted);
    }
    return part == parts ? segments.count : low;
  };
  context.parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    Sums sums(program, segments, columns);
    const int64_t end = segment_at(last);
    for (int64_t segment = segment_at(first); segment < end; ++segment) {
      sums.finish(segment, heads);
    }
    if (kRows && last == parts) {
      for (int64_t place = summed; place < segments.rows; ++place) sums.at(-1, place);
    }
    finish_streams();
  });
}

// Rows of at most so many bytes of sums are added in their own order: for each of them a sort picks
// a line of every operand from anywhere in memory, and that takes longer than the additions.
inline constexpr int64_t kInOrderBytes = 256;
// So are rows of segments whose sums all stay in the second-level cache, unless the largest segment
// has more than such a share of the rows: its thread would work alone.
inline constexpr int64_t kFewSegmentsBytes = 256 * 1024, kFewSegmentsShare = 8;

// How many rows each segment has, or null if one has more than `most`, which is 255 at most.
template <class Context, SegmentOfRow F>
const uint8_t* small_sizes(const Context& context, int64_t rows, int64_t count, const F& segment_of,
                           uint8_t most) {
  auto* sizes = static_cast<uint8_t*>(context.workspace(count + 1));
  std::fill_n(sizes, count, uint8_t{0});
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t segment = segment_of(row);
    if (segment < 0 || segment >= count) continue;
    if (sizes[segment]++ == most) return nullptr;
  }
  return sizes;
}

// How many rows each segment has, or null unless they are few and all at most a share of all rows.
template <class Context, SegmentOfRow F>
const int64_t* sizes_of_few(const Context& context, int64_t rows, int64_t count,
                            const F& segment_of, int64_t bytes_per_segment) {
  if (count * bytes_per_segment > kFewSegmentsBytes) return nullptr;
  auto* sizes = static_cast<int64_t*>(context.workspace((count + 1) * sizeof(int64_t)));
  std::fill_n(sizes, count, 0);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t segment = segment_of(row);
    if (segment >= 0 && segment < count) ++sizes[segment];
  }
  const int64_t largest = count > 0 ? *std::max_element(sizes, sizes + count) : 0;
  return largest * kFewSegmentsShare <= rows ? sizes : nullptr;
}

// One thread's segments [begin, end), whose sums lie `distance` apart. Segments of more rows than
// are added up without a merge have totals, like the sums.
template <bool kTotals, class Program>
class SumsInOrder {
 public:
  using T = typename Program::value_type;
  static constexpr int N = Program::kSums;

  SumsInOrder(const Program& program, int64_t rows, int64_t columns, int64_t count, T* sums,
              double* totals, uint8_t* added)
      : program_(program),
        rows_(rows),
        columns_(columns),
        count_(count),
        ahead_(rows_ahead(columns)),
        sums_(sums),
        totals_(totals),
        added_(added),
        row_(rows, columns, nullptr),
        result_(count, columns, nullptr) {}

  // Numbers from one segment's first sum to the next one's: the last lanes, of two groups where
  // they are paired, write behind the last column.
  static int64_t distance(int64_t columns) {
    const int64_t lanes = columns <= kGroup ? kGroup : 2 * kGroup;
    return (N - 1) * sums_stride(columns) + (columns + lanes - 1) / lanes * lanes;
  }

  // Takes the rows of segments [begin, end), and with_rest those of none.
  template <SegmentOfRow F>
  void add(int64_t begin, int64_t end, bool with_rest, const F& segment_of) {
    std::fill(sums_of(begin), sums_of(end), T(0));
    if constexpr (kTotals) {
      const int64_t apart = distance(columns_);
      std::fill(totals_ + begin * apart, totals_ + end * apart, 0.0);
      std::fill(added_ + begin, added_ + end, uint8_t{0});
    }
    int taken = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t segment = segment_of(row);
      const bool has_none = segment < 0 || segment >= count_;
      taken_[taken] = {has_none ? -1 : segment, row};
      taken += has_none ? with_rest : segment >= begin && segment < end;
      if (taken == kTaken) add_taken(std::exchange(taken, 0));
    }
    add_taken(taken);
  }

  void finish(int64_t begin, int64_t end) {
    for (int64_t segment = begin; segment < end; ++segment) {
      if constexpr (kTotals) {
        merge(segment);
        std::copy_n(totals_ + segment * distance(columns_), distance(columns_), sums_of(segment));
      }
      row_.set_sums(sums_of(segment));
      row_.order_sums(N);
      result_.move_to(segment);
      Array<ReadView<T>, N> sums;
      for (int n = 0; n < N; ++n) sums[n] = {sums_of(segment) + n * sums_stride(columns_)};
      program_.finish(result_, sums);
    }
  }

 private:
  static constexpr int kTaken = 256;
  struct Taken {
    int64_t segment, row;
  };

  T* sums_of(int64_t segment) const { return sums_ + segment * distance(columns_); }

  void add_taken(int count) {
    for (int i = 0; i < count; ++i) {
      const auto [segment, row] = taken_[i];
      const auto [later_segment, later] = taken_[std::min<int64_t>(i + ahead_, count - 1)];
      const T* later_sums = sums_of(std::max<int64_t>(later_segment, 0));
      for (int64_t c = 0; c < columns_; c += 64 / sizeof(T)) {
        __builtin_prefetch(later_sums + c, 1, 2);
      }
      row_.move_to(segment, row, later_segment, later);
      program_.row(row_);
      if (segment < 0) continue;
      row_.set_sums(sums_of(segment));
      program_.column_sums(row_);
      if constexpr (kTotals) {
        if (++added_[segment] == kRowsPerMerge<Program, T>) merge(segment);
      }
    }
  }

  // Moves the sums of a segment to its total.
  void merge(int64_t segment) {
    const int64_t apart = distance(columns_);
    T* sums = sums_of(segment);
    double* totals = totals_ + segment * apart;
    APEX_VECTORIZE
    for (int64_t i = 0; i < apart; ++i) {
      totals[i] += static_cast<double>(sums[i]);
      sums[i] = T(0);
    }
    added_[segment] = 0;
  }

  const Program& program_;
  const int64_t rows_, columns_, count_, ahead_;
  T* sums_;
  double* totals_;
  uint8_t* added_;  // rows that are in the sums, of each segment
  SegmentRow<T> row_;
  Row<T> result_;
  Taken taken_[kTaken];
};

// The row program and the sums in the rows' own order, of segments whose sizes are given. Every
// thread looks at all rows, and takes those of its own segments.
template <bool kTotals, class Context, class Size, SegmentOfRow F, SegmentProgram Program>
void sum_in_order(const Context& context, int64_t rows, int64_t columns, int64_t count,
                  const F& segment_of, const Size* sizes, const Program& program) {
  using T = typename Program::value_type;
  using Sums = SumsInOrder<kTotals, Program>;
  const int64_t numbers = count * Sums::distance(columns);
  // Sums of narrower operands may lie by slot.
  constexpr bool kMayBeResults = !kTotals && std::is_same_v<typename Program::storage_type, T> &&
                                 requires { program.sums_as_results(); };
  T* results = nullptr;  // whose numbers are the sums
  if constexpr (kMayBeResults) {
    if (Sums::distance(columns) == columns) results = program.sums_as_results();
  }
  T* sums = results;
  if (results == nullptr) sums = static_cast<T*>(context.workspace(numbers * sizeof(T) + 1));
  double* totals = nullptr;
  uint8_t* added = nullptr;
  if (kTotals) {
    totals = static_cast<double*>(context.workspace(numbers * sizeof(double) + 1));
    added = static_cast<uint8_t*>(context.workspace(count + 1));
  }
  const int64_t work = rows + count;
  const int64_t parts = std::clamp<int64_t>(work * columns / kRowwiseGrain, 1, context.threads());
  // Threads have equal shares of rows and segments together.
  auto* ends = static_cast<int64_t*>(context.workspace((parts + 1) * sizeof(int64_t)));
  std::fill_n(ends, parts + 1, count);
  ends[0] = 0;
  for (int64_t segment = 0, part = 1, done = 0; segment < count && part < parts; ++segment) {
    done += sizes[segment] + 1;
    if (done >= work * part / parts) ends[part++] = segment + 1;
  }
  context.parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    Sums own(program, rows, columns, count, sums, totals, added);
    own.add(ends[first], ends[last], first == 0, segment_of);
    // Programs that always need finish() must not ask: where it might be left out, the additions
    // before it took 1.07 times as long.
    if (!kMayBeResults || results == nullptr) own.finish(ends[first], ends[last]);
    finish_streams();
  });
}

// sum_in_order(), where that is faster than sorting; otherwise does nothing and returns false.
template <class Context, SegmentOfRow F, SegmentProgram Program>
bool rows_in_order(const Context& context, int64_t rows, int64_t columns, int64_t count,
                   const F& segment_of, const Program& program) {
  using T = typename Program::value_type;
  constexpr int64_t kNumber = sizeof(T) + sizeof(double);
  const int64_t bytes = SumsInOrder<true, Program>::distance(columns) * kNumber;
  if (auto* sizes = sizes_of_few(context, rows, count, segment_of, bytes)) {
    sum_in_order<true>(context, rows, columns, count, segment_of, sizes, program);
    return true;
  }
  if (columns * static_cast<int64_t>(sizeof(T)) > kInOrderBytes) return false;
  auto* sizes = small_sizes(context, rows, count, segment_of, uint8_t{kRowsPerMerge<Program, T>});
  if (sizes == nullptr) return false;
  sum_in_order<false>(context, rows, columns, count, segment_of, sizes, program);
  return true;
}

template <class Context, SegmentProgram Program>
void segment_sum(const Context& context, const Segments& segments, int64_t columns,
                 const Program& program) {
  run_segment_sum<false>(context, segments, columns, program);
}

template <class Context, SegmentProgram Program>
void rowwise_segment_sum(const Context& context, const Segments& segments, int64_t columns,
                         const Program& program) {
  run_segment_sum<true>(context, segments, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
