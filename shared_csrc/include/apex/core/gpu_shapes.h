// The numbers that decide how launches on a GPU are cut, and what a thread has under way.
//
// They may change the order of sums, never what is summed. `python ci/gpu.py --campaign` measures
// engines that were compiled with other numbers (ci/campaign.toml); what wins is written here. A
// line each, as the campaign reads them.
#pragma once

#include "apex/core/config.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// 16-byte stores that leave the caches first, for what is not read again soon. CUDA alone.
inline constexpr bool kStreamingStores = false;

// Kernels begin while those before them end (programmatic dependent launch), and wait within. For
// kernels that NVRTC compiles, from compute capability 9.0 on.
inline constexpr bool kDependentLaunches = false;

// Rows. A group of lanes takes a short row, which needs no barrier; a longer one has a block.
inline constexpr int kFewestLanes = 8;     // of a row
inline constexpr int kGroupThreads = 128;  // of a block of rows that groups take
inline constexpr int kRowThreads = 512;    // of a row, at most
inline constexpr int kRowPacks = 4;        // that a thread keeps, at most
inline constexpr int kReadThreads = 256;   // of a row that is not kept, at most
inline constexpr int kReadPacks = 2;       // that it takes together of rows that are not kept
inline constexpr int kRowLoads = 8;        // of 16 bytes, that a thread has under way; in lists too
// Blocks that registers must suffice for; 0: what compilers choose, which spill a word for more.
inline constexpr int kRowResidentBlocks = 0;
inline constexpr int kKeptResidentBlocks = 1;  // of rows that are kept
inline constexpr int64_t kRowBlocks = 65536;   // rows beyond are taken in a grid-stride loop

// Rows whose threads add up columns too: blocks stay, and each has sums of its own.
inline constexpr int kColumnPacks = 2;         // of a thread
inline constexpr int64_t kColumnBlocks = 256;  // at most, but for
inline constexpr int64_t kColumnRows = 64;     // rows that a thread adds up, and more if there are
inline constexpr int64_t kMostColumnBlocks = 1024;

// Columns and samples, in tiles of packs side by side.
inline constexpr int kTileThreads = 256;
inline constexpr int kTilePacks = 32;          // side by side, at most
inline constexpr int64_t kTileRows = 8;        // of a thread, at least
inline constexpr int64_t kTileMostRows = 256;  // of a thread, at most: its sums are no doubles
inline constexpr int64_t kTileBlocks = 768;    // that rows are divided for
inline constexpr int64_t kTileSums = 512;      // of a group: fewer, each block adds up
inline constexpr int64_t kTileSplits = 32;     // of a column: no more, each block adds up
inline constexpr int64_t kTileEachRows = 2;    // of a thread that uses such sums, at least
inline constexpr int64_t kRowParts = 32;       // of a channel's rows, or more of long ones: as well

// Segments.
inline constexpr int kSegmentThreads = 256;
inline constexpr int kSegmentRows = 4;            // that a thread has under way
inline constexpr int kSegmentResidentBlocks = 2;  // see kRowResidentBlocks

// Lists of tensors.
inline constexpr int kForeachThreads = 256;
inline constexpr int kForeachPacks = 4;           // of a thread, at most, and at most kRowLoads
inline constexpr int kForeachResidentBlocks = 0;  // see kRowResidentBlocks
// Packs that a thread combines in T before it goes on in double: more would lose digits, fewer
// would ask too much of GPUs whose double arithmetic is slow.
inline constexpr int kReduceRun = 4;

}  // namespace APEX_BACKEND_NS
}  // namespace apex
