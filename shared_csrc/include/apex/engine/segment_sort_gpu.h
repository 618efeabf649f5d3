// Rows sorted by segment on a GPU. Each of a few rows counts those before it: one launch. More take
// a stable counting sort: one launch counts, then one for each digit of the segment moves rows, and
// counts them for the next. Atomics add integers alone, so that nothing depends on their order.
#pragma once

#include <algorithm>
#include <limits>

#include "apex/engine/rowwise_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Sorted rows after which a run of additions ends, as on the CPU; here it bounds what one thread
// adds up of a long segment.
inline constexpr int64_t kSegmentTile = 128;
inline constexpr int64_t kMapBlocks = 65536;
// Rows that count those before them, at most, and comparisons with where segments begin.
inline constexpr int64_t kRankedRows = 4096, kRankedPairs = 1 << 24;
inline constexpr int kRankPacks = 256;  // of 4 rows, that a block has in shared memory at once

// Each tile of rows reads the counts of all, so these are few.
inline constexpr int64_t kSortTiles = 128;
inline constexpr int kRowsPerSortThread = 8;
inline constexpr int kDigitBits = 8, kMostDigitBits = 11, kFewBits = 24;
template <class I>
inline constexpr int kSortThreads = sizeof(I) == 4 ? 256 : 128;  // 48 KiB suffice for all digits
template <class I>
inline constexpr int64_t kSortChunk = kSortThreads<I> * kRowsPerSortThread;

// Blocks of threads for `count` pieces of work, one a thread.
inline dim3 blocks_for(int64_t count) {
  int64_t blocks = (count + kSegmentThreads - 1) / kSegmentThreads;
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMapBlocks)));
}

APEX_DEVICE int64_t first_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
APEX_DEVICE int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// What a thread adds up of a segment: its rows [begin, end), kRun of them at once, and the sums
// [head, last_head). `other` is what the program asks for.
struct SegmentPart {
  int64_t segment, begin, end, head, last_head, other;
};

// Rows sorted by segment; those of none are behind the last segment's, and of segment `count`.
// Numbers are int32 unless is_wide.
struct Segments {
  int64_t rows, count;
  int64_t heads;  // tiles of rows, of which one that is alone has no sum of its own
  bool is_wide;
  bool has_offsets;   // else the sums' first launch finds them
  const void* keys;   // [rows], their segments
  const void* order;  // [rows], where they were
  void* offsets;      // [count + 1], how many rows have a segment below

  struct Part : SegmentPart {
    static constexpr int64_t kRun = kSegmentTile;
    const void* order;
    bool is_wide;
    template <int N>
    APEX_DEVICE void rows(int64_t place, int64_t (&into)[N]) const {
      if (is_wide) {
        for (int i = 0; i < N; ++i) into[i] = static_cast<const int64_t*>(order)[place + i];
      } else {
        for (int i = 0; i < N; ++i) into[i] = static_cast<const int32_t*>(order)[place + i];
      }
    }
  };

  APEX_DEVICE int64_t number(const void* numbers, int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(numbers)[i]
                   : static_cast<const int32_t*>(numbers)[i];
  }

  // The first of the sorted rows [low, high) whose segment is not below this one.
  APEX_DEVICE int64_t find(int64_t segment, int64_t low, int64_t high) const {
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (number(keys, middle) < segment) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // What a tile has of a segment that began before it.
  APEX_DEVICE Part head(int64_t tile) const {
    const int64_t begin = tile * kSegmentTile;
    const int64_t segment = number(keys, begin);
    if (tile == 0 || number(keys, begin - 1) != segment) return {};
    return {{segment, begin, find(segment + 1, begin, min(begin + kSegmentTile, rows)), 0, 0, 0},
            order,
            is_wide};
  }

  APEX_DEVICE Part first(int64_t segment) const {
    const int64_t begin = number(offsets, segment);
    const int64_t end = segment == count ? rows : number(offsets, segment + 1);
    const int64_t tile = begin / kSegmentTile + 1;  // the next
    const int64_t tiles = (end + kSegmentTile - 1) / kSegmentTile;
    return {{segment, begin, min(end, tile * kSegmentTile), tile, tiles, 0}, order, is_wide};
  }

  APEX_DEVICE void find_offsets() const {
    if (has_offsets) return;
    for (int64_t segment = first_of_thread(); segment <= count; segment += all_threads()) {
      const int64_t offset = find(segment, 0, rows);
      if (is_wide) {
        static_cast<int64_t*>(offsets)[segment] = offset;
      } else {
        static_cast<int32_t*>(offsets)[segment] = static_cast<int32_t>(offset);
      }
    }
  }
};

template <class F>
APEX_DEVICE int64_t key_of(const F& segment_of, int64_t row, int64_t count) {
  const int64_t segment = segment_of(row);
  return segment < 0 || segment > count ? count : segment;
}

using RankPack = Vector<int32_t, 4>;

// A row's number is that of its segment times `rows`, and its own: how many are below it is its
// place, and how many are below a segment's are where that begins.
template <class F>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_ranks(int rows, int64_t count, F segment_of, int32_t* keys, int32_t* order,
                  int32_t* offsets) {
  wait_for_kernels_before();
  APEX_SHARED(RankPack, packs, [kRankPacks]);
  const int64_t i = first_of_thread();
  const bool is_row = i < rows;
  const int64_t key = is_row ? key_of(segment_of, i, count) : i - rows;
  const int number = key > count ? 0 : static_cast<int>(key * rows + (is_row ? i : 0));
  int place = 0;
  for (int begin = 0; begin < rows; begin += 4 * kRankPacks) {
    constexpr int kEach = 4 * kRankPacks / kSegmentThreads;
    int64_t own[kEach];
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const int row = begin + u * kSegmentThreads + static_cast<int>(threadIdx.x);
      own[u] = key_of(segment_of, min(row, rows - 1), count);
    }
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const int k = u * kSegmentThreads + static_cast<int>(threadIdx.x), row = begin + k;
      packs[k / 4].values[k % 4] = row < rows ? static_cast<int>(own[u] * rows + row) : 0x7fffffff;
    }
    __syncthreads();
    const int filled = min(kRankPacks, (rows - begin + 3) / 4);
#pragma unroll 4
    for (int pack = 0; pack < filled; ++pack) {
      const RankPack others = packs[pack];
      for (int k = 0; k < 4; ++k) place += others.values[k] < number ? 1 : 0;
    }
    __syncthreads();
  }
  if (is_row) {
    keys[place] = static_cast<int32_t>(key);
    order[place] = static_cast<int32_t>(i);
  } else if (key <= count && offsets != nullptr) {
    offsets[key] = place;
  }
}

// How rows are cut for a sort by digits, of `bits` each, in tiles of whole chunks.
struct SortShape {
  int64_t rows, tile_rows;
  int tiles, bits, passes;

  APEX_HD int digits() const { return 1 << bits; }
  APEX_HD int digit(int64_t key, int pass) const {
    return static_cast<int>(key >> (pass * bits)) & (digits() - 1);
  }
  // Of a pass, [tiles, digits].
  APEX_HD unsigned* counts(unsigned* all, int pass) const {
    return all + static_cast<int64_t>(pass) * tiles * digits();
  }
};

// keys, and of the first pass how many rows of a tile have a digit.
template <class F, class I>
__global__ void __launch_bounds__(kSortThreads<I>)
    segment_counts(SortShape shape, int64_t count, F segment_of, unsigned* counts, I* keys) {
  wait_for_kernels_before();
  APEX_DYNAMIC_SHARED(memory);
  auto* sizes = reinterpret_cast<unsigned*>(memory);
  const int digits = shape.digits(), thread = threadIdx.x;
  const int64_t tile = blockIdx.x, end = min(shape.rows, (tile + 1) * shape.tile_rows);
  for (int digit = thread; digit < digits; digit += kSortThreads<I>) sizes[digit] = 0;
  __syncthreads();
  for (int64_t chunk = tile * shape.tile_rows; chunk < end; chunk += kSortChunk<I>) {
    int64_t own[kRowsPerSortThread];
#pragma unroll
    for (int i = 0; i < kRowsPerSortThread; ++i) {
      own[i] = key_of(segment_of, min(chunk + i * kSortThreads<I> + thread, end - 1), count);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerSortThread; ++i) {
      const int64_t row = chunk + i * kSortThreads<I> + thread;
      if (row >= end) continue;
      keys[row] = static_cast<I>(own[i]);
      atomicAdd(&sizes[shape.digit(own[i], 0)], 1u);
    }
  }
  __syncthreads();
  for (int digit = thread; digit < digits; digit += kSortThreads<I>) {
    counts[tile * digits + digit] = sizes[digit];
    for (int pass = 1; pass < shape.passes; ++pass) {
      shape.counts(counts, pass)[tile * digits + digit] = 0;
    }
  }
}

// places[digit]: where the first row of this tile goes that has the digit.
template <class I>
APEX_DEVICE void find_places(const SortShape& shape, const unsigned* counts, I* places) {
  APEX_SHARED(I, sums, [kSortThreads<I>]);
  const int digits = shape.digits(), thread = threadIdx.x, tile = blockIdx.x;
  const int each = (digits + kSortThreads<I> - 1) / kSortThreads<I>;
  I own = 0;
  for (int digit = thread * each; digit < min(digits, (thread + 1) * each); ++digit) {
    I before = 0, all = 0;
#pragma unroll 16
    for (int other = 0; other < shape.tiles; ++other) {
      const I size = static_cast<I>(counts[static_cast<int64_t>(other) * digits + digit]);
      before += other < tile ? size : 0;
      all += size;
    }
    places[digit] = own + before;
    own += all;
  }
  sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kSortThreads<I>; step *= 2) {
    const I other = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += other;
    __syncthreads();
  }
  for (int digit = thread * each; digit < min(digits, (thread + 1) * each); ++digit) {
    places[digit] += sums[thread] - own;
  }
  __syncthreads();
}

// How many rows of a group of lanes have this lane's digit, and how many of those are before it.
struct Alike {
  int all, before;
};

APEX_DEVICE Alike alike(int digit) {
  const int lane = threadIdx.x % kGroupLanes;
  Alike found{1, 0};
#pragma unroll
  for (int mask = 1; mask < kGroupLanes; ++mask) {
    const bool same = shuffle_lanes(0xffffffffu, digit, mask) == digit;
    found.all += same ? 1 : 0;
    found.before += same && (lane ^ mask) < lane ? 1 : 0;
  }
  return found;
}

template <class I>
struct SortedRows {
  I *keys, *order;
};

// Moves a chunk of rows to their places. sizes, [groups of lanes, digits]: at the end of the
// counting, rows of the chunk from a group on.
template <class I>
class SortedChunk {
 public:
  static constexpr int kGroups = kSortThreads<I> / kGroupLanes;

  APEX_DEVICE SortedChunk(const SortShape& shape, int pass, int64_t begin, int64_t end,
                          uint16_t* sizes)
      : shape_(shape), pass_(pass), end_(end), sizes_(sizes) {
    const int group = threadIdx.x / kGroupLanes;
    mine_ = sizes + group * shape.digits();
    first_ = begin + group * kGroupLanes * kRowsPerSortThread + threadIdx.x % kGroupLanes;
  }

  APEX_DEVICE void load(const SortedRows<I>& from, bool is_first) {
#pragma unroll
    for (int i = 0; i < kRowsPerSortThread; ++i) {
      const int64_t row = min(first_ + i * kGroupLanes, end_ - 1);
      keys_[i] = from.keys[row];
      order_[i] = is_first ? static_cast<I>(row) : from.order[row];
    }
  }

  APEX_DEVICE void count(I* places) {
    const int digits = shape_.digits(), thread = threadIdx.x;
    for (int k = thread; k < kGroups * digits; k += kSortThreads<I>) sizes_[k] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerSortThread; ++i) {
      const int digit = has(i) ? shape_.digit(keys_[i], pass_) : -1;
      const Alike same = alike(digit);
      const int before = has(i) ? mine_[digit] : 0;
      sync_lanes(0xffffffffu);
      if (has(i) && same.before == 0) mine_[digit] = static_cast<uint16_t>(before + same.all);
      sync_lanes(0xffffffffu);
      ranks_[i] = before + same.before;
    }
    __syncthreads();
    for (int digit = thread; digit < digits; digit += kSortThreads<I>) {
      int rows = 0;
      for (int group = kGroups - 1; group >= 0; --group) {
        uint16_t& size = sizes_[group * digits + digit];
        rows += size;
        size = static_cast<uint16_t>(rows);
      }
      places[digit] += rows;
    }
    __syncthreads();
  }

  // next: counts of the next pass, or null.
  APEX_DEVICE void move(const I* places, const SortedRows<I>& to, unsigned* next) const {
#pragma unroll
    for (int i = 0; i < kRowsPerSortThread; ++i) {
      if (!has(i)) continue;
      const int digit = shape_.digit(keys_[i], pass_);
      const int64_t place = places[digit] - mine_[digit] + ranks_[i];
      to.keys[place] = keys_[i];
      to.order[place] = order_[i];
      if (next == nullptr) continue;
      int64_t rest;
      const int64_t tile = divide(place, shape_.tile_rows, rest);
      atomicAdd(next + tile * shape_.digits() + shape_.digit(keys_[i], pass_ + 1), 1u);
    }
  }

 private:
  APEX_DEVICE bool has(int i) const { return first_ + i * kGroupLanes < end_; }

  const SortShape& shape_;
  int pass_;
  int64_t first_, end_;
  uint16_t *sizes_, *mine_;
  I keys_[kRowsPerSortThread], order_[kRowsPerSortThread];
  int ranks_[kRowsPerSortThread];
};

template <class I>
__global__ void __launch_bounds__(kSortThreads<I>)
    segment_moves(SortShape shape, int pass, unsigned* counts, SortedRows<I> from,
                  SortedRows<I> to) {
  wait_for_kernels_before();
  APEX_DYNAMIC_SHARED(memory);
  I* places = reinterpret_cast<I*>(memory);
  auto* sizes = reinterpret_cast<uint16_t*>(places + shape.digits());
  find_places(shape, shape.counts(counts, pass), places);
  unsigned* next = pass + 1 < shape.passes ? shape.counts(counts, pass + 1) : nullptr;
  const int64_t begin = blockIdx.x * shape.tile_rows,
                end = min(shape.rows, begin + shape.tile_rows);
  for (int64_t first = begin; first < end; first += kSortChunk<I>) {
    SortedChunk<I> chunk(shape, pass, first, end, sizes);
    chunk.load(from, pass == 0);
    chunk.count(places);
    chunk.move(places, to, next);
    __syncthreads();
  }
}

inline int64_t sorted_tiles(int64_t rows) {
  const int64_t tiles = (rows + kSegmentTile - 1) / kSegmentTile;
  return tiles > 1 ? tiles : 0;
}

template <class I>
SortShape sort_shape(int64_t rows, int64_t count, int64_t most_tiles) {
  int all = 1;
  while (count >> all != 0) ++all;
  const int most = all > kFewBits ? kMostDigitBits : kDigitBits;
  SortShape shape{rows, 0, 0, 0, (all + most - 1) / most};
  shape.bits = (all + shape.passes - 1) / shape.passes;
  const int64_t chunks = std::max<int64_t>((rows + kSortChunk<I> - 1) / kSortChunk<I>, 1);
  shape.tile_rows = (chunks + most_tiles - 1) / most_tiles * kSortChunk<I>;
  shape.tiles = std::max(static_cast<int>((rows + shape.tile_rows - 1) / shape.tile_rows), 1);
  return shape;
}

// I: of which type numbers are.
template <class I, class Context, SegmentOfRow F>
Segments sort_rows(const Context& context, int64_t rows, int64_t count, const F& segment_of,
                   int64_t most_tiles = kSortTiles) {
  const SortShape shape = sort_shape<I>(rows, count, most_tiles);
  auto* numbers = static_cast<I*>(context.workspace((4 * rows + count + 1) * sizeof(I)));
  auto* counts = static_cast<unsigned*>(
      context.workspace(sizeof(unsigned) * shape.passes * shape.tiles * shape.digits()));
  SortedRows<I> from{numbers, numbers + rows}, to{numbers + 2 * rows, numbers + 3 * rows};
  const dim3 grid(static_cast<unsigned>(shape.tiles)), block(kSortThreads<I>);
  const size_t digits = shape.digits();
  launch<segment_counts<F, I>>(grid, block, digits * sizeof(unsigned), context.stream(), shape,
                               count, segment_of, counts, from.keys);
  constexpr size_t kBytes = sizeof(I) + SortedChunk<I>::kGroups * sizeof(uint16_t);  // of a digit
  for (int pass = 0; pass < shape.passes; ++pass) {
    launch<segment_moves<I>>(grid, block, digits * kBytes, context.stream(), shape, pass, counts,
                             from, to);
    std::swap(from, to);
  }
  context.check_launch("segment_moves");
  return {rows,  count,     sorted_tiles(rows), sizeof(I) == 8,
          false, from.keys, from.order,         numbers + 4 * rows};
}

template <class Context, SegmentOfRow F>
Segments group_rows(const Context& context, int64_t rows, int64_t count, const F& segment_of) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (rows > kRankedRows || count >= kMost / std::max<int64_t>(rows, 1)) {
    if (std::max(rows, count) >= kMost) return sort_rows<int64_t>(context, rows, count, segment_of);
    return sort_rows<int32_t>(context, rows, count, segment_of);
  }
  auto* keys = static_cast<int32_t*>(context.workspace((2 * rows + count + 1) * sizeof(int32_t)));
  int32_t *order = keys + rows, *offsets = order + rows;
  const bool has_offsets = rows * count <= kRankedPairs;
  launch<segment_ranks<F>>(blocks_for(rows + (has_offsets ? count + 1 : 0)), dim3(kSegmentThreads),
                           0, context.stream(), static_cast<int>(rows), count, segment_of, keys,
                           order, has_offsets ? offsets : nullptr);
  context.check_launch("segment_ranks");
  return {rows, count, sorted_tiles(rows), false, has_offsets, keys, order, offsets};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
