// Sums over columns and then rows that need them, on a GPU, in two launches: where a column has few
// splits, each block of the second one adds up those of its columns. No atomics.
#pragma once

#include "apex/engine/colwise_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The columns of a block, whose splits are still to be added up.
template <class Sums, int N>
class SplitTile : public ColumnTile<Sums, N> {
  using Tile = ColumnTile<Sums, N>;
  using Tile::first_, Tile::kMost, Tile::kSums, Tile::packs_, Tile::shape_;
  using typename Tile::T;
  struct alignas(16) Vectors {
    T numbers[kSums * kMost];
  };

 public:
  APEX_DEVICE explicit SplitTile(const TileShape& shape) : Tile(shape) {}

  // The rows' program with the sums, by all threads: as many as fit share a column's splits, which
  // one of them merges in their order. The first block of a column stores its results.
  template <class Rows>
  APEX_DEVICE Rows with_sums(const Sums& sums, const Rows& rows, const double* partials,
                             int64_t splits) const {
    constexpr int kPlaces = kMost > kTileThreads ? kMost : kTileThreads;
    APEX_SHARED(double, parts, [kSums][kPlaces]);
    APEX_SHARED(Vectors, vectors);
    const int width = packs_ * N, teams = max(1, kTileThreads / width), places = teams * width;
    for (int i = threadIdx.x; i < places; i += kTileThreads) {
      Array<double, kSums> total{};
#pragma unroll 4
      for (int64_t split = i / width; split < splits; split += teams) {
        Array<double, kSums> part;
        for (int n = 0; n < kSums; ++n) {
          part[n] = partials[(split * kSums + n) * shape_.columns + first_ + i % width];
        }
        merge_sums(sums, total, part);
      }
      for (int n = 0; n < kSums; ++n) parts[n][i] = total[n];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += kTileThreads) {
      Array<double, kSums> total{};
      for (int i = column; i < places; i += width) {
        Array<double, kSums> part;
        for (int n = 0; n < kSums; ++n) part[n] = parts[n][i];
        merge_sums(sums, total, part);
      }
      if (blockIdx.y == 0) finish_column(sums, first_ + column, total);
      for (int n = 0; n < kSums; ++n) {
        vectors.numbers[n * kMost + column] = static_cast<T>(total[n]);
      }
    }
    __syncthreads();
    return rows.with_sums(ColumnVectors<T>{vectors.numbers - first_, kMost});
  }
};

// partials: [splits, kSums, columns].
template <class Sums, class Rows, int N>
__global__ void __launch_bounds__(kTileThreads)
    split_rows(TileShape shape, const double* partials, int64_t splits, Sums sums, Rows rows) {
  wait_for_kernels_before();
  const SplitTile<Sums, N> tile(shape);
  const Rows with_sums = tile.with_sums(sums, rows, partials, splits);
  ThreadRows<typename Sums::value_type, N> own = tile.rows();
  with_sums.row(own);
}

// A tile of rows alone.
template <class Rows>
struct TileOf {
  using value_type = typename Rows::value_type;
  static constexpr int kSums = 0;
};

template <class Rows, int N>
__global__ void __launch_bounds__(kTileThreads) tile_rows(TileShape shape, Rows rows) {
  wait_for_kernels_before();
  const ColumnTile<TileOf<Rows>, N> tile(shape);
  ThreadRows<typename Rows::value_type, N> own = tile.rows();
  rows.row(own);
}

template <int N, class Context, class Rows>
void launch_tile_rows(const Context& context, int64_t rows, int64_t columns, const Rows& each) {
  const TileShape shape(rows, columns, N, kTileEachRows);
  launch<tile_rows<Rows, N>>(shape.grid(1), dim3(kTileThreads), 0, context.stream(), shape, each);
  context.check_launch("tile_rows");
}

template <class Context, class Rows>
void columns_each(const Context& context, int64_t rows, int64_t columns, const Rows& each) {
  constexpr int N = matrix_pack<Rows>();
  if (rows == 0 || columns == 0) return;
  if (columns % N == 0) {
    launch_tile_rows<N>(context, rows, columns, each);
  } else {
    launch_tile_rows<1>(context, rows, columns, each);
  }
}

// Whether there were few splits, but not one.
template <int N, class Context, class Sums, class Rows>
bool launched_in_splits(const Context& context, int64_t rows, int64_t columns, const Sums& sums,
                        const Rows& each) {
  const TileShape shape(rows, columns, N);
  const int64_t splits = shape.splits();
  if (splits == 1 || splits > kTileSplits) return false;
  const auto bytes = splits * Sums::kSums * columns * sizeof(double);
  double* partials = static_cast<double*>(context.workspace(bytes));
  launch<column_packs<Sums, N>>(shape.grid(1), dim3(kTileThreads), 0, context.stream(), shape,
                                partials, sums);
  context.check_launch("column_packs");
  const TileShape of_rows(rows, columns, N, kTileEachRows);
  launch<split_rows<Sums, Rows, N>>(of_rows.grid(1), dim3(kTileThreads), 0, context.stream(),
                                    of_rows, partials, splits, sums, each);
  context.check_launch("split_rows");
  return true;
}

template <class Context, ColumnProgram Sums, class Rows>
void colwise_each(const Context& context, int64_t rows, int64_t columns, const Sums& sums,
                  const Rows& each) {
  constexpr int N = matrix_pack<Sums>();
  const bool is_done = columns % N == 0 ? launched_in_splits<N>(context, rows, columns, sums, each)
                                        : launched_in_splits<1>(context, rows, columns, sums, each);
  if (is_done) return;
  colwise(context, rows, columns, sums);
  columns_each(context, rows, columns, each);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
