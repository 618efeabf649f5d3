// Row programs on a GPU: 8 to 32 lanes for short rows, a block of up to 512 threads for long ones.
//
// What a program stages is read once, all of it before the first number is used, and kept in
// registers; rows that are too wide for that are read again in each pass. Neither the number of
// rows nor where one lies decides anything: a row has the same bits in every batch.
#pragma once

#include <algorithm>

#include "apex/engine/row_concepts.h"
#include "apex/engine/row_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements of a pack of what a program stages.
template <class Program>
constexpr int staged_pack() {
  if constexpr (requires { typename Program::staged_type; }) {
    return pack_size<typename Program::staged_type>();
  }
  return pack_size<typename Program::value_type>();
}

template <class R, class Program>
APEX_DEVICE void rows_of_block(int64_t rows, R& row, const Program& program) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; index < rows;
       index += step) {
    row.move_to(index);
    program.row(row);
  }
}

// Of a block, at most: rows that are not kept are walked through, by threads with more registers.
template <int kPacks, bool kKept>
constexpr int row_threads() {
  return kPacks == 1 ? kGroupThreads : kKept ? kRowThreads : kReadThreads;
}

template <class Program, int kPacks, bool kKept>
__global__ void APEX_LAUNCH_BOUNDS((row_threads<kPacks, kKept>()),
                                   kKept ? kKeptResidentBlocks : kRowResidentBlocks)
    rowwise_kernel(int64_t rows, int64_t columns, Program program) {
  wait_for_kernels_before();
  int phase = 0;
  Row<typename Program::value_type, staged_pack<Program>(), kPacks, kKept> row(columns, &phase);
  rows_of_block(rows, row, program);
}

// A block of rows of so many packs, of which a thread has one, or several if it is of a whole
// group.
inline dim3 row_block(int64_t packs, int packs_of_thread, int most) {
  int threads = packs_of_thread == 1 ? kFewestLanes : kGroupLanes;
  while (threads < most && threads * packs_of_thread < packs) threads *= 2;
  return dim3(threads, threads <= kGroupLanes ? kGroupThreads / threads : 1);
}

template <class P>
concept RowProgram = RowProgramOn<P, Row<typename P::value_type, staged_pack<P>()>>;

template <int kPacks, bool kKept, class Context, class Program>
void launch_rows(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  constexpr int N = staged_pack<Program>();
  const dim3 block = row_block((columns + N - 1) / N, kPacks, row_threads<kPacks, kKept>());
  const int64_t blocks = std::min<int64_t>((rows + block.y - 1) / block.y, kRowBlocks);
  launch<rowwise_kernel<Program, kPacks, kKept>>(dim3(static_cast<unsigned>(blocks)), block, 0,
                                                 context.stream(), rows, columns, program);
  context.check_launch("rowwise");
}

// Whether rows are kept in registers. Those of float64, which few need fast, are not: each such
// kernel takes seconds to compile.
template <class Program>
inline constexpr bool kKeepsRows = false;
template <class Program>
  requires requires { typename Program::staged_type; }
inline constexpr bool kKeepsRows<Program> = sizeof(typename Program::value_type) == 4;

template <class Context, RowProgram Program>
void rowwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  if (rows == 0) return;
  constexpr int64_t N = staged_pack<Program>(), kKeptColumns = N * kRowPacks * kRowThreads;
  if constexpr (kKeepsRows<Program>) {
    // Rows of other widths begin anywhere: their elements go one by one to and from memory, in
    // another order than that of packs.
    if (columns % N == 0) {
      if (columns <= N * kGroupLanes) return launch_rows<1, true>(context, rows, columns, program);
      if (columns <= kKeptColumns) {
        return launch_rows<kRowPacks, true>(context, rows, columns, program);
      }
      if constexpr (N == 4) {  // as many columns as of 16 bits
        if (columns <= 2 * kKeptColumns) {
          return launch_rows<2 * kRowPacks, true>(context, rows, columns, program);
        }
      }
    }
  } else if (columns <= N * kGroupLanes) {
    return launch_rows<1, false>(context, rows, columns, program);
  }
  launch_rows<kReadPacks, false>(context, rows, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
