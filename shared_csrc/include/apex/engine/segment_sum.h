// segment_sum: add up the rows of matrices [rows, columns] that belong to one segment, for every
// segment; rowwise_segment_sum: a row program over the same operands too, in one pass on the CPU.
//
//   Segments segments = group_rows(context, rows, count, segment_of);   // segment_of(row)
//   segment_sum(context, segments, columns, program);
//
// segment_of(row) is in [0, count); any other number keeps the row out of every sum. Beside
// `value_type`, a program has
//   using storage_type = S;                            // its narrowest operand's
//   static constexpr int kSums;                        // numbers accumulated per column
//   template <class R> void column_sums(R& row) const  // adds row row.index():
//     { row.template accumulate<kSums>([](Array<T, kSums>& sums, T x) { sums[0] += x; },
//                                      row.in(x)); }
//   template <class R, class Sums> void finish(R& row, const Sums& sums) const  // of a segment:
//     { row.each([](T& y, T sum) { y = sum; }, row.out(y), sums[0]); }   // row.index() is its
//     number
// where rows have a program too, row(R&), which passes over them by each() alone,
// and, where finish() copies sums, one number per column, to [count, columns] of that type,
//   T* sums_as_results() const { return y; }           // to which a CPU may add the rows
//
// Rows of a segment are added in their order, in runs that end where a tile of kSegmentTile sorted
// rows does. No number is added by an atomic, and nothing depends on the number of threads: the
// same input gives the same bits. A segment without rows is finished with zeros.
#pragma once

#include <algorithm>

#include "apex/core/config.h"
#include "apex/engine/rowwise.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// How many rows ahead of its turn a CPU asks memory for a row: rows lie anywhere, and short ones
// are done before it has answered.
inline constexpr int64_t kAheadElements = 1024, kAheadRows = 16;

inline int64_t rows_ahead(int64_t columns) {
  return std::clamp<int64_t>(kAheadElements / std::max<int64_t>(columns, 1), 1, kAheadRows);
}

template <class F>
concept SegmentOfRow = std::is_trivially_copyable_v<F> && requires(const F& segment_of) {
  { segment_of(int64_t{}) } -> std::same_as<int64_t>;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/segment_sort_gpu.h"
#include "apex/engine/segment_sum_gpu.h"
#else
#include "apex/engine/segment_sum_cpu.h"
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

// rowwise_segment_sum(), or rowwise() where nobody wants the sums.
template <class Context, SegmentOfRow F, class Program>
void rowwise_segment_sum(const Context& context, int64_t rows, int64_t columns, int64_t count,
                         const F& segment_of, bool with_sums, const Program& program) {
  if (!with_sums) return rowwise(context, rows, columns, program);
#if !defined(APEX_GPU)
  if (rows_in_order(context, rows, columns, count, segment_of, program)) return;
#endif
  rowwise_segment_sum(context, group_rows(context, rows, count, segment_of), columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
