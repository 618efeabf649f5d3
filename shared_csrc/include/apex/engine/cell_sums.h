// cell_sums: add up the rows of matrices whose rows are cells (t, u) of samples, over the cells of
// every frame, and over those of every label.
//
//   cell_sums(context, cells, columns, of_frames, of_labels);
//
// Both are programs as of segment_sum(), with one sum a column: segments of one are the frames
// [batch, frames], of the other the labels [batch, width]. A CPU reads the rows once, a GPU once
// for each program.
#pragma once

#include "apex/core/cells.h"
#include "apex/engine/segment_sum.h"

#if defined(APEX_GPU)
#include "apex/engine/cell_sums_gpu.h"
#else
#include "apex/engine/cell_sums_cpu.h"
#endif
