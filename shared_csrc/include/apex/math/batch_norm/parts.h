// How a tensor is divided into parts that are summed apart.
//
// A part of [N, C, elements] is a row of elements. Of a matrix [rows, columns] a GPU makes one
// part. On a CPU `group` rows side by side are walked as one row, so that few columns, too, fill
// vectors, and after kChunkRows of those a new set of sums begins: both keep sums short. Short rows
// are summed down the batch there, as the columns of [N, C * elements].
#pragma once

#include <algorithm>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Whether matrices are summed in parts, and short rows as columns. On a GPU 32 lanes share a row
// and no launch more is worth it.
#if defined(APEX_CPU)
inline constexpr bool kMatrixParts = true;
#else
inline constexpr bool kMatrixParts = false;
#endif
// Rows of fewer elements are short.
inline constexpr int64_t kShortRow = 128;
// Columns that a group of rows should have: their sums fit the first-level cache of a CPU.
inline constexpr int64_t kPartColumns = 1024;
inline constexpr int64_t kChunkRows = 16384;

struct Parts {
  int64_t columns;  // results per part: channels, or more where rows are short
  int64_t group;    // rows side by side: a chunk makes this many parts
  int64_t chunks;
  int64_t full;  // elements per channel in a part of any chunk but the last
  int64_t last;  // the same in the last chunk
  int64_t rest;  // the same in one part more, of the rows that fill no group

  int64_t count() const { return chunks * group + (rest > 0 ? 1 : 0); }

  // Elements per channel in a part.
  APEX_HD int64_t operator()(int64_t part) const {
    int64_t chunk = part / group;
    if (chunk >= chunks) return rest;
    return chunk + 1 == chunks ? last : full;
  }

  // run(rows, columns, first element of the matrix, first element of the results [parts, columns])
  // for each matrix whose columns are to be summed.
  template <class F>
  void each(const F& run) const {
    int64_t wide = group * columns, element = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int64_t rows = chunk + 1 == chunks ? last : full;
      run(rows, wide, element, chunk * wide);
      element += rows * wide;
    }
    if (rest > 0) run(rest, columns, element, chunks * wide);
  }
};

// A matrix [rows, columns].
inline Parts parts_of_matrix(int64_t rows, int64_t columns) {
  if constexpr (!kMatrixParts) return {columns, 1, 1, rows, rows, 0};
  int64_t most = std::max<int64_t>(1, rows / 8);  // a part of fewer rows does not pay
  int64_t group = std::clamp<int64_t>(kPartColumns / columns, 1, most);
  int64_t grouped = rows / group;
  int64_t chunks = (grouped + kChunkRows - 1) / kChunkRows;
  int64_t full = std::min(grouped, kChunkRows);
  return {columns, group, chunks, full, grouped - full * (chunks - 1), rows - grouped * group};
}

// A tensor [batch, channels, elements], of which each row of elements has been reduced.
inline Parts parts_of_batch(int64_t batch, int64_t channels, int64_t elements) {
  return {channels, 1, batch, elements, elements, 0};
}

// Parts such as ranks, with counts in memory.
struct CountsOf {
  const int64_t* counts;  // [parts]
  APEX_HD int64_t operator()(int64_t part) const { return counts[part]; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
