// Sums over the columns of every matrix of a batch, then its rows, on a GPU: four launches for the
// whole batch, without atomics.
#pragma once

#include "apex/core/divide.h"
#include "apex/engine/colwise_gpu.h"
#include "apex/engine/samplewise.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T, int N>
struct SampleSums {
  const T* partials;  // [splits, N, columns]
  int64_t splits, columns;

  APEX_DEVICE Array<double, N> operator()(int64_t column) const {
    Array<double, N> sums{};
    for (int64_t split = 0; split < splits; ++split) {
      for (int n = 0; n < N; ++n) {
        sums[n] += static_cast<double>(partials[(split * N + n) * columns + column]);
      }
    }
    return sums;
  }
};

template <class Program>
struct BeforeSample {
  Program program;

  template <class G>
  APEX_HD void sample(G& group) const {
    program.of_sample(group.index()).before(group);
  }
};

template <class Program, class T>
struct BetweenSample {
  Program program;
  const T* partials;  // [samples, splits, kSums, columns]
  int64_t splits, columns;

  template <class G>
  APEX_HD void sample(G& group) const {
    constexpr int N = Program::kSums;
    const T* own = partials + group.index() * splits * N * columns;
    program.of_sample(group.index()).between(group, SampleSums<T, N>{own, splits, columns});
  }
};

template <class Program>
struct RowsOfSamples {
  using value_type = typename Program::value_type;

  Program program;
  int64_t rows;

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t rest;
    program.of_sample(divide(row.index(), rows, rest)).row(row);
  }
};

// partials: [samples, splits, kSums, columns].
template <class Program, class T>
__global__ void APEX_LAUNCH_BOUNDS(kColwiseBoundThreads, 0)
    sample_tiles(int64_t rows, int64_t columns, int64_t tiles, T* partials, Program program) {
  const int64_t sample = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t splits = gridDim.y, split = blockIdx.y, first = sample * rows;
  const int64_t column = tile * kGroupLanes + threadIdx.x;
  const auto sums = tile_sums<T>(first + rows * split / splits, first + rows * (split + 1) / splits,
                                 columns, column, program.of_sample(sample));
  if (threadIdx.y != 0 || column >= columns) return;
  store_partial(sums, columns, column,
                partials + (sample * splits + split) * Program::kSums * columns);
}

template <class Context, SampleProgram Program>
void colwise_rowwise(const Context& context, int64_t samples, int64_t rows, int64_t columns,
                     const Program& program) {
  using T = typename Program::value_type;
  if (samples == 0 || rows == 0 || columns == 0) return;
  const int64_t splits = std::clamp<int64_t>(rows / kColwiseRows, 1, kColwiseSplits);
  const int64_t tiles = (columns + kGroupLanes - 1) / kGroupLanes;
  T* partials =
      static_cast<T*>(context.workspace(samples * splits * Program::kSums * columns * sizeof(T)));
  samplewise(context, samples, BeforeSample<Program>{program});
  launch<sample_tiles<Program, T>>(
      dim3(static_cast<unsigned>(samples * tiles), static_cast<unsigned>(splits)),
      dim3(kGroupLanes, kColwiseThreadsY), 0, context.stream(), rows, columns, tiles, partials,
      program);
  context.check_launch("sample_tiles");
  samplewise(context, samples, BetweenSample<Program, T>{program, partials, splits, columns});
  rowwise(context, samples * rows, columns, RowsOfSamples<Program>{program, rows});
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
