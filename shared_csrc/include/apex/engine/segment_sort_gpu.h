// Rows sorted by segment on a GPU: a stable counting sort, six bits of the segment at a time.
//
// Each pass counts digits per tile of rows, adds up the counts, and moves rows to their places. No
// atomics: rows of a segment stay in their order.
#pragma once

#include <algorithm>

#include "apex/engine/rowwise_gpu.h"
#include "apex/engine/segment_sum.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

inline constexpr int kDigitBits = 6, kDigits = 1 << kDigitBits;
inline constexpr int kSortThreads = 128, kRowsPerSortThread = 8;
inline constexpr int64_t kSortChunk = kSortThreads * kRowsPerSortThread;
inline constexpr int64_t kSortTiles = 512;  // at most; a tile is one chunk of rows or several
inline constexpr int kScanThreads = 256;
inline constexpr int64_t kMapBlocks = 65536;

// Blocks of threads for `count` pieces of work, one a thread.
inline dim3 blocks_for(int64_t count) {
  int64_t blocks = (count + kSegmentThreads - 1) / kSegmentThreads;
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMapBlocks)));
}

APEX_DEVICE int64_t first_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
APEX_DEVICE int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Rows, and the segments that they belong to; `count` is that of rows of none.
struct SortedRows {
  int64_t* keys;
  int64_t* order;
};

template <class F>
__global__ void segment_keys(int64_t rows, int64_t count, F segment_of, SortedRows to) {
  for (int64_t row = first_of_thread(); row < rows; row += all_threads()) {
    int64_t segment = segment_of(row);
    to.keys[row] = segment < 0 || segment > count ? count : segment;
    to.order[row] = row;
  }
}

// One tile of rows a block. counts, [kDigits, tiles]: how many rows of the tile have a digit, or
// with kMoves, where the first of them goes.
template <bool kMoves>
__global__ void __launch_bounds__(kSortThreads)
    segment_digits(int64_t rows, int shift, int64_t* counts, SortedRows from, SortedRows to) {
  APEX_SHARED(uint16_t, ranks, [kDigits][kSortThreads + 2]);  // no two digits in one bank
  APEX_SHARED(int64_t, places, [kDigits]);
  const int64_t tile = blockIdx.x, tiles = gridDim.x;
  const int thread = threadIdx.x;
  const bool has_digit = thread < kDigits;
  if (has_digit) places[thread] = kMoves ? counts[thread * tiles + tile] : 0;
  const int64_t end = rows * (tile + 1) / tiles;
  for (int64_t chunk = rows * tile / tiles; chunk < end; chunk += kSortChunk) {
    const int64_t begin = min(end, chunk + static_cast<int64_t>(thread) * kRowsPerSortThread);
    const int own = static_cast<int>(min(end - begin, static_cast<int64_t>(kRowsPerSortThread)));
    for (int digit = 0; digit < kDigits; ++digit) ranks[digit][thread] = 0;
    for (int i = 0; i < own; ++i) {
      ++ranks[(from.keys[begin + i] >> shift) & (kDigits - 1)][thread];
    }
    __syncthreads();
    int total = 0;
    if (has_digit) {
      for (int other = 0; other < kSortThreads; ++other) {
        int size = ranks[thread][other];
        ranks[thread][other] = static_cast<uint16_t>(total);
        total += size;
      }
    }
    __syncthreads();
    if constexpr (kMoves) {
      for (int i = 0; i < own; ++i) {
        const int64_t key = from.keys[begin + i];
        const int digit = static_cast<int>((key >> shift) & (kDigits - 1));
        const int64_t place = places[digit] + ranks[digit][thread]++;
        to.keys[place] = key;
        to.order[place] = from.order[begin + i];
      }
      __syncthreads();
    }
    if (has_digit) places[thread] += total;
  }
  if constexpr (!kMoves) {
    if (has_digit) counts[thread * tiles + tile] = places[thread];
  }
}

// counts[i] := the sum of counts before i. One block: there are at most kDigits * kSortTiles.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) segment_scan(int64_t size, int64_t* counts) {
  APEX_SHARED(int64_t, sums, [kThreads]);
  const int thread = threadIdx.x;
  const int64_t begin = size * thread / kThreads, end = size * (thread + 1) / kThreads;
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  sums[thread] = sum;
  __syncthreads();
  int64_t before = 0;
  for (int other = 0; other < thread; ++other) before += sums[other];
  for (int64_t i = begin; i < end; ++i) {
    int64_t own = counts[i];
    counts[i] = before;
    before += own;
  }
}

// offsets[s]: how many rows have a segment below s.
template <int>
__global__ void segment_offsets(int64_t rows, int64_t count, const int64_t* keys,
                                int64_t* offsets) {
  for (int64_t segment = first_of_thread(); segment <= count; segment += all_threads()) {
    int64_t low = 0, high = rows;
    while (low < high) {
      int64_t middle = low + (high - low) / 2;
      if (keys[middle] < segment) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    offsets[segment] = low;
  }
}

template <class Context, SegmentOfRow F>
Segments group_rows(const Context& context, int64_t rows, int64_t count, const F& segment_of) {
  const int64_t tiles = std::clamp<int64_t>((rows + kSortChunk - 1) / kSortChunk, 1, kSortTiles);
  auto numbers = [&](int64_t n) {
    return static_cast<int64_t*>(context.workspace(std::max<int64_t>(n, 1) * sizeof(int64_t)));
  };
  int64_t *offsets = numbers(count + 1), *counts = numbers(kDigits * tiles);
  SortedRows from{numbers(rows), numbers(rows)}, to{numbers(rows), numbers(rows)};
  auto stream = context.stream();
  launch<segment_keys<F>>(blocks_for(rows), dim3(kSegmentThreads), 0, stream, rows, count,
                          segment_of, from);
  const dim3 grid(static_cast<unsigned>(tiles)), block(kSortThreads);
  for (int shift = 0; shift == 0 || count >> shift != 0; shift += kDigitBits) {
    launch<segment_digits<false>>(grid, block, 0, stream, rows, shift, counts, from, to);
    launch<segment_scan<kScanThreads>>(dim3(1), dim3(kScanThreads), 0, stream, kDigits * tiles,
                                       counts);
    launch<segment_digits<true>>(grid, block, 0, stream, rows, shift, counts, from, to);
    std::swap(from, to);
  }
  launch<segment_offsets<0>>(blocks_for(count + 1), dim3(kSegmentThreads), 0, stream, rows, count,
                             from.keys, offsets);
  context.check_launch("group_rows");
  return {rows, count, offsets, from.order};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
