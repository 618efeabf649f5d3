// Sums over the columns of every matrix of a batch, then its rows, on a GPU: two launches for the
// whole batch, and one more between them where many blocks share a matrix. No atomics.
#pragma once

#include "apex/engine/colwise_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What a matrix's blocks left of its columns: [splits, kSums, all columns of the batch].
template <class Program>
struct SampleSums {
  using T = typename Program::value_type;

  const Program& program;  // of this matrix
  const T* partials;       // from its first column on
  int64_t splits, stride;

  APEX_DEVICE Array<double, Program::kSums> sums(int64_t column) const {
    constexpr int kSums = Program::kSums, kTogether = kRowLoads / kSums;
    Array<double, kSums> total{};
#pragma unroll 1
    for (int64_t first = 0; first < splits; first += kTogether) {
      T own[kTogether][kSums];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        for (int n = 0; n < kSums; ++n) {
          const int64_t at = ((first + u) * kSums + n) * stride + column;
          own[u][n] = first + u < splits ? partials[at] : T(0);
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        for (int n = 0; n < kSums; ++n) total[n] += static_cast<double>(own[u][n]);
      }
    }
    return total;
  }
  APEX_DEVICE auto before(int64_t column) const { return program.before(column); }
};

// Lanes side by side, a power of two up to 32, that have a group of columns together.
struct LaneTeam {
  int lanes;

  APEX_DEVICE int lane() const { return threadIdx.x % lanes; }

  template <int N, class F>
  APEX_DEVICE Array<double, N> sum(int64_t begin, int64_t end, const F& f) const {
    Array<double, N> total{};
    for (int64_t i = begin + lane(); i < end; i += lanes) total = Add{}(total, f(i));
    return reduce_lanes(total, Add{}, lanes);
  }
  template <class F>
  APEX_DEVICE void each(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin + lane(); i < end; i += lanes) f(i);
  }
  template <class F>
  APEX_DEVICE void once(const F& f) const {
    if (lane() == 0) f();
  }
};

// The same with the numbers of its columns, in shared memory.
template <class Program, int N>
class SampleTile : public ColumnTile<Program, N> {
  using Tile = ColumnTile<Program, N>;
  using Tile::first_, Tile::kMost, Tile::packs_, Tile::shape_;
  using typename Tile::T;
  struct alignas(16) Statistics {
    double numbers[2 * kMost];
  };

 public:
  APEX_DEVICE explicit SampleTile(const TileShape& shape) : Tile(shape) {}

  APEX_DEVICE int64_t all_columns() const { return gridDim.x / shape_.tiles * shape_.columns; }

  // The program with all that rows need of them. Groups may have columns of other blocks, too.
  APEX_DEVICE Program with_all(const Program& program, const T* partials, int64_t splits) const {
    APEX_SHARED(Statistics, statistics);
    const int width = static_cast<int>(program.group_columns()), group = first_ / width;
    const int groups = (first_ + packs_ * N - 1) / width + 1 - group;
    const SampleSums<Program> matrix{program, partials + this->matrix() * shape_.columns, splits,
                                     all_columns()};
    LaneTeam team{1};
    while (team.lanes < width && team.lanes < kGroupLanes) team.lanes *= 2;
    const int teams = kTileThreads / team.lanes, own = threadIdx.x / team.lanes;
    // Lanes of one warp stay together, for they shuffle.
    for (int i = own; i - own % (kGroupLanes / team.lanes) < groups; i += teams) {
      const int index = group + min(i, groups - 1);
      const Array<double, 2> of_group = program.statistics(team, index, matrix);
      if (i >= groups) continue;
      team.once([&] {
        statistics.numbers[2 * i] = of_group[0];
        statistics.numbers[2 * i + 1] = of_group[1];
      });
      if (blockIdx.y == 0 && index * width >= first_) program.keep(team, index, of_group, matrix);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < packs_ * N; i += kTileThreads) {
      const int column = first_ + i, at = 2 * (column / width - group);
      const auto before = program.before(column);
      this->put(0, i, before);
      const Array<double, 2> of_group{statistics.numbers[at], statistics.numbers[at + 1]};
      this->put(Program::kBefore, i, program.after(column, before, of_group));
    }
    __syncthreads();
    return this->with_vectors(program);
  }
};

// partials: [splits, kSums, all columns of the batch].
template <class Program, int N, class T>
__global__ void __launch_bounds__(kTileThreads)
    sample_sums(TileShape shape, T* partials, Program program) {
  wait_for_kernels_before();
  const SampleTile<Program, N> tile(shape);
  const Program of_sample = tile.with_before(program.of_sample(tile.matrix()));
  const ThreadSums<Program, N> own(of_sample, tile.rows());
  const int64_t all = tile.all_columns();
  T* of_block = partials + blockIdx.y * Program::kSums * all + tile.matrix() * shape.columns;
  tile.merge(program, own.sums, [&](int column, const Array<double, Program::kSums>& sums) {
    store_partial(sums, all, column, of_block);
  });
}

template <class Program, int N, class T>
__global__ void __launch_bounds__(kTileThreads)
    sample_rows(TileShape shape, const T* partials, int64_t splits, Program program) {
  wait_for_kernels_before();
  const SampleTile<Program, N> tile(shape);
  const Program all = tile.with_all(program.of_sample(tile.matrix()), partials, splits);
  ThreadRows<T, N> own = tile.rows();
  all.row(own);
}

// Adds up the splits of all columns of a batch.
template <class T, int N>
struct MergedSums {
  using value_type = T;
  static constexpr int kSums = N;
  T* merged;  // [kSums, columns]
  int64_t columns;

  APEX_HD void finish(int64_t column, const Array<double, N>& sums) const {
    for (int n = 0; n < N; ++n) merged[n * columns + column] = static_cast<T>(sums[n]);
  }
};

template <int N, class Context, class Program>
void launch_samples(const Context& context, int64_t samples, int64_t rows, int64_t columns,
                    const Program& program) {
  using T = typename Program::value_type;
  constexpr int kSums = Program::kSums;
  const TileShape shape(rows, columns, N);
  const int64_t all = samples * columns, splits = shape.splits();
  // Else each block of the second launch adds up the groups that it needs.
  const bool merges = splits > 1 && splits * program.group_columns() >= kTileSums;
  T* partials = static_cast<T*>(context.workspace(splits * kSums * all * sizeof(T)));
  launch<sample_sums<Program, N, T>>(shape.grid(samples), dim3(kTileThreads), 0, context.stream(),
                                     shape, partials, program);
  context.check_launch("sample_sums");
  if (merges) {  // into the first
    merge_partials(context, splits, all, partials, MergedSums<T, kSums>{partials, all});
  }
  launch<sample_rows<Program, N, T>>(shape.grid(samples), dim3(kTileThreads), 0, context.stream(),
                                     shape, partials, merges ? int64_t{1} : splits, program);
  context.check_launch("sample_rows");
}

template <class Context, SampleProgram Program>
void colwise_rowwise(const Context& context, int64_t samples, int64_t rows, int64_t columns,
                     const Program& program) {
  constexpr int N = matrix_pack<Program>();
  if (samples == 0 || rows == 0 || columns == 0) return;
  if (columns % N == 0) {
    launch_samples<N>(context, samples, rows, columns, program);
  } else {
    launch_samples<1>(context, samples, rows, columns, program);
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
