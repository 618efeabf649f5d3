// cell_sums: add up the rows of matrices whose rows are cells (t, u) of samples, over the cells of
// every frame, and over those of every label.
//
//   cell_sums(context, cells, columns, of_frames, of_labels);
//
// Both are programs as of segment_sum(), with one sum a column: segments of one are the frames
// [batch, frames], of the other the labels [batch, width]. But column_sums(row, sums_of_cell) is
// also given a function, which returns the numbers of both segments: rows of operands that have one
// for each frame or label. A CPU reads the rows once, a GPU once for each program.
#pragma once

#include "apex/core/cells.h"
#include "apex/engine/segment_sum.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The sums that a cell is added to.
struct SumsOfCell {
  int64_t frame, label;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/cell_sums_gpu.h"
#else
#include "apex/engine/cell_sums_cpu.h"
#endif
