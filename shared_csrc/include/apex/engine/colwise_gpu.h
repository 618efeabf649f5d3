// Column programs on a GPU: blocks sum tiles of rows and columns; where a column has several, a
// second kernel merges them.
//
// No atomics: the same input gives the same bits.
#pragma once

#include "apex/engine/tiles_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class P>
concept ColumnProgram = ColumnProgramOn<P, ThreadSums<P, 1>>;

// What kCount rows of threads, from `first` on, have of a column, merged pair by pair.
template <int kCount, int kRows, class Program>
APEX_DEVICE Array<double, Program::kSums> merged_rows(
    const Program& program, const double (&shared)[Program::kSums][kRows][kGroupLanes], int first) {
  constexpr int kSums = Program::kSums;
  Array<double, kSums> sums;
  if constexpr (kCount == 1) {
    for (int n = 0; n < kSums; ++n) sums[n] = shared[n][first][threadIdx.x];
  } else {
    sums = merged_rows<kCount / 2>(program, shared, first);
    merge_sums(program, sums, merged_rows<kCount / 2>(program, shared, first + kCount / 2));
  }
  return sums;
}

// Merge what the threads of a block have of the same column; threads of threadIdx.y == 0 get it. In
// double, as all that follows: roundings of the largest numbers would cost more than those before.
template <int kRows, class Program>
APEX_DEVICE void merge_block(const Program& program, Array<double, Program::kSums>& sums) {
  constexpr int kSums = Program::kSums;
  APEX_SHARED(double, shared, [kSums][kRows][kGroupLanes]);
  for (int n = 0; n < kSums; ++n) shared[n][threadIdx.y][threadIdx.x] = sums[n];
  __syncthreads();
  if (threadIdx.y == 0) sums = merged_rows<kRows>(program, shared, 0);
}

// finish(), in double where the program takes it, too.
template <class Program, int N>
APEX_DEVICE void finish_column(const Program& program, int64_t column,
                               const Array<double, N>& sums) {
  if constexpr (requires { program.finish(column, sums); }) {
    program.finish(column, sums);
  } else {
    program.finish(column, convert_sums<typename Program::value_type>(sums));
  }
}

// partials: [kSums, columns].
template <class T, int kSums>
APEX_DEVICE void store_partial(const Array<double, kSums>& sums, int64_t columns, int64_t column,
                               T* partials) {
  for (int n = 0; n < kSums; ++n) partials[n * columns + column] = static_cast<T>(sums[n]);
}

// Rows of threads that merge splits: as many as shared memory has room for.
template <class Program>
inline constexpr int kMergeRows = Program::kSums <= 4 ? 32 : 8;

// P: double, or of rows that add up their columns the type of those.
template <class Program, class P>
__global__ void __launch_bounds__(kGroupLanes* kMergeRows<Program>)
    colwise_merge(int64_t splits, int64_t columns, const P* partials, Program program) {
  wait_for_kernels_before();
  constexpr int kSums = Program::kSums, kRows = kMergeRows<Program>;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kGroupLanes + threadIdx.x;
  auto part_of = [&](int64_t split) {
    Array<P, kSums> part;
    for (int n = 0; n < kSums; ++n) part[n] = partials[(split * kSums + n) * columns + column];
    return convert_sums<double>(part);
  };
  Array<double, kSums> sums{};
  if (column < columns && threadIdx.y < splits) {
    sums = part_of(threadIdx.y);
    constexpr int kTogether = kSums < 8 ? 8 / kSums : 1;  // of more loads compilers wait for some
#pragma unroll kTogether
    for (int64_t split = threadIdx.y + kRows; split < splits; split += kRows) {
      merge_sums(program, sums, part_of(split));
    }
  }
  merge_block<kRows>(program, sums);
  if (threadIdx.y == 0 && column < columns) finish_column(program, column, sums);
}

template <class Context, class Program, class P>
void merge_partials(const Context& context, int64_t splits, int64_t columns, const P* partials,
                    const Program& program) {
  const auto tiles = static_cast<unsigned>((columns + kGroupLanes - 1) / kGroupLanes);
  launch<colwise_merge<Program, P>>(dim3(tiles), dim3(kGroupLanes, kMergeRows<Program>), 0,
                                    context.stream(), splits, columns, partials, program);
  context.check_launch("colwise_merge");
}

// run(partials) for a kernel that sums splits: with null where one split is all, and merged after.
template <class Context, class Program, class Run>
void in_splits(const Context& context, int64_t splits, int64_t columns, const Program& program,
               const Run& run) {
  double* partials = nullptr;
  if (splits > 1) {
    partials =
        static_cast<double*>(context.workspace(splits * Program::kSums * columns * sizeof(double)));
  }
  run(partials);
  if (splits > 1) merge_partials(context, splits, columns, partials, program);
}

// partials: [splits, kSums, columns]; null where one split is all.
template <class Program, int N>
__global__ void __launch_bounds__(kTileThreads)
    column_packs(TileShape shape, double* partials, Program program) {
  wait_for_kernels_before();
  const ColumnTile<Program, N> tile(shape);
  const Program of_tile = [&] {
    if constexpr (HasBefore<Program>) return tile.with_before(program);
    return program;
  }();
  const ThreadSums<Program, N> own(of_tile, tile.rows());
  tile.merge(program, own.sums, [&](int column, const Array<double, Program::kSums>& sums) {
    if (partials == nullptr) {
      finish_column(program, column, sums);
    } else {
      store_partial(sums, shape.columns, column,
                    partials + static_cast<int64_t>(blockIdx.y) * Program::kSums * shape.columns);
    }
  });
}

template <int N, class Context, class Program>
void launch_column_packs(const Context& context, int64_t rows, int64_t columns,
                         const Program& program) {
  const TileShape shape(rows, columns, N);
  in_splits(context, shape.splits(), columns, program, [&](double* partials) {
    launch<column_packs<Program, N>>(shape.grid(1), dim3(kTileThreads), 0, context.stream(), shape,
                                     partials, program);
    context.check_launch("column_packs");
  });
}

template <class Context, ColumnProgram Program>
void colwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  constexpr int N = matrix_pack<Program>();
  if (columns == 0) return;
  if (columns % N == 0) {
    launch_column_packs<N>(context, rows, columns, program);
  } else {
    launch_column_packs<1>(context, rows, columns, program);
  }
}

// Rows, whose threads add up their columns in the same pass; partials: [blocks, kSums, columns].
template <class Program, int kPacks, class T>
__global__ void APEX_LAUNCH_BOUNDS((row_threads<kPacks, true>()), kKeptResidentBlocks)
    rowwise_columns(int64_t rows, int64_t columns, T* partials, Program program) {
  wait_for_kernels_before();
  constexpr int N = staged_pack<Program>();
  APEX_SHARED(T, exchange, [kGroupThreads * N]);
  int phase = 0;
  Row<T, N, kPacks, true, Program::kSums> row(columns, &phase);
  rows_of_block(rows, row, program);
  row.store_columns(partials + static_cast<int64_t>(blockIdx.x) * Program::kSums * columns,
                    exchange);
}

// Blocks stay, for sums of their own: how many depends on the shape alone, not on the GPU.
template <int kPacks, class Context, class Program>
void launch_rows_and_columns(const Context& context, int64_t rows, int64_t columns,
                             const Program& program) {
  using T = typename Program::value_type;
  const dim3 block = row_block(columns / staged_pack<Program>(), kPacks, kRowThreads);
  const int64_t turns = (rows + block.y - 1) / block.y;
  const int64_t most = std::clamp(turns / kColumnRows, kColumnBlocks, kMostColumnBlocks);
  const int64_t blocks = std::min(turns, most);
  T* partials = static_cast<T*>(context.workspace(blocks * Program::kSums * columns * sizeof(T)));
  launch<rowwise_columns<Program, kPacks, T>>(dim3(static_cast<unsigned>(blocks)), block, 0,
                                              context.stream(), rows, columns, partials, program);
  context.check_launch("rowwise_columns");
  merge_partials(context, blocks, columns, partials, program);
}

// Two launches where row() adds to the sums, and registers hold those of all columns; else the rows
// are read again, mostly from the L2 cache.
template <class Context, class Program>
  requires RowProgram<Program> && ColumnProgram<Program>
void rowwise_colwise(const Context& context, int64_t rows, int64_t columns,
                     const Program& program) {
  if constexpr (kColumnsInRow<Program> && kKeepsRows<Program>) {
    constexpr int64_t N = staged_pack<Program>();
    if (rows > 0 && columns > 0 && columns % N == 0) {
      if (columns <= N * kGroupLanes) {
        return launch_rows_and_columns<1>(context, rows, columns, program);
      }
      if (columns <= N * kColumnPacks * kRowThreads) {
        return launch_rows_and_columns<kColumnPacks>(context, rows, columns, program);
      }
    }
  }
  rowwise(context, rows, columns, program);
  colwise(context, rows, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
