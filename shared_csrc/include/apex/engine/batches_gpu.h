// Lists of tensors on a GPU: batches that fit into kernel parameters, and the partial results of
// their blocks.
#pragma once

#include <algorithm>
#include <limits>

#include "apex/core/gpu.h"
#include "apex/core/gpu_shapes.h"
#include "apex/core/table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Kernel parameters may take 4 KiB on every GPU; some room is for the functor.
inline constexpr size_t kForeachTableBytes = 3584;

// A batch of tensors by value, each a range of blocks of kBlockElements. Travelling as a kernel
// parameter it needs no copy to the device, no synchronisation, and is safe under graph capture.
template <int kColumns, int64_t kBlockElements>
struct ForeachBatch {
  static constexpr int kTensors =
      static_cast<int>(kForeachTableBytes / (kColumns * sizeof(void*) + 2 * sizeof(int64_t)));
  void* data[kTensors][kColumns];
  int64_t numel[kTensors];
  int64_t first_block[kTensors];  // prefix sum of blocks
  int64_t first_tensor;           // row of the table that data[0] is
  Array<Storage, kColumns> storage;
  int tensors;

  APEX_HD int64_t blocks_of(int tensor) const {
    return (numel[tensor] + kBlockElements - 1) / kBlockElements;
  }

  // The tensor that the calling block works on.
  APEX_DEVICE int tensor_of_block() const {
    int low = 0, high = tensors - 1;
    while (low < high) {
      int middle = (low + high + 1) / 2;
      if (first_block[middle] <= static_cast<int64_t>(blockIdx.x)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // The first of this tensor's elements that are the calling block's.
  APEX_DEVICE int64_t begin_of_block(int tensor) const {
    return (static_cast<int64_t>(blockIdx.x) - first_block[tensor]) * kBlockElements;
  }
};

// Calls body(batch, blocks) for batches of the table's tensors, in order.
template <int kColumns, int64_t kBlockElements, class Body>
void for_each_batch(const TensorTable& table, const Body& body) {
  using Batch = ForeachBatch<kColumns, kBlockElements>;
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  Batch batch;
  batch.storage = table.storages<kColumns>();
  for (int64_t tensor = 0; tensor < table.tensors();) {
    batch.first_tensor = tensor;
    batch.tensors = 0;
    int64_t blocks = 0;
    for (; tensor < table.tensors() && batch.tensors < Batch::kTensors; ++tensor) {
      const int next = batch.tensors;
      batch.numel[next] = table.numel[tensor];
      if (next > 0 && blocks + batch.blocks_of(next) > kMaxBlocks) break;
      std::copy_n(table.row(tensor), kColumns, batch.data[next]);
      batch.first_block[next] = blocks;
      blocks += batch.blocks_of(next);
      ++batch.tensors;
    }
    body(batch, blocks);
  }
}

// With every block's partial results in partials[block * stride], those of one tensor combined in a
// fixed order by all threads of the calling block.
template <class Batch, class Combine>
APEX_DEVICE double combine_partials(const Batch& batch, int tensor, const double* partials,
                                    int stride, const Combine& combine) {
  const int64_t begin = batch.first_block[tensor], end = begin + batch.blocks_of(tensor);
  double result = 0;
  for (int64_t block = begin + threadIdx.x; block < end; block += kForeachThreads) {
    result = combine(result, partials[block * stride]);
  }
  return reduce_row(result, combine);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
