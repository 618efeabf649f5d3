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

// Rows. Up to kGroupColumns columns a group of lanes takes a row, which needs no barrier, and up to
// kWideColumns a block of kGroupThreads; wider rows have a block of kRowwiseThreads. Neither the
// number of rows nor where one lies decides anything: a row has the same bits in every batch.
inline constexpr int64_t kGroupColumns = 512;
inline constexpr int64_t kWideColumns = 1024;
inline constexpr int kFewestLanes = 8;     // of a row
inline constexpr int kGroupThreads = 128;  // of a block of rows that groups take
inline constexpr int kRowwiseThreads = 256;
inline constexpr int64_t kRowwiseBlocks = 65536;  // rows beyond are taken in a grid-stride loop
inline constexpr int kRowwiseResidentBlocks = 0;  // that registers must suffice for; 0: any number

// Columns.
inline constexpr int kColwiseThreadsY = 8;      // rows of threads of a block: a power of two
inline constexpr int kRowsInFlight = 4;         // of each thread
inline constexpr int64_t kColwiseRows = 128;    // rows per tile, at least
inline constexpr int64_t kColwiseSplits = 128;  // tiles along the rows, at most
inline constexpr bool kColwiseBounds = false;   // whether compilers know the threads of a block

// Lists of tensors.
inline constexpr int kForeachThreads = 256;
inline constexpr int kForeachPacks = 4;           // packs per thread: several loads in flight
inline constexpr int kForeachResidentBlocks = 0;  // see kRowwiseResidentBlocks
// Packs that a thread combines in T before it goes on in double: more would lose digits, fewer
// would ask too much of GPUs whose double arithmetic is slow.
inline constexpr int kReduceRun = 4;

}  // namespace APEX_BACKEND_NS
}  // namespace apex
