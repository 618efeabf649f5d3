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
  int64_t blocks;         // of the batch
  int64_t blocks_before;  // of the batches before

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

// Calls body(batch) for batches of the table's tensors, in order.
template <int kColumns, int64_t kBlockElements, class Body>
void for_each_batch(const TensorTable& table, const Body& body) {
  using Batch = ForeachBatch<kColumns, kBlockElements>;
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  Batch batch;
  batch.storage = table.storages<kColumns>();
  batch.blocks_before = 0;
  for (int64_t tensor = 0; tensor < table.tensors();) {
    batch.first_tensor = tensor;
    batch.tensors = 0;
    batch.blocks = 0;
    for (; tensor < table.tensors() && batch.tensors < Batch::kTensors; ++tensor) {
      const int next = batch.tensors;
      batch.numel[next] = table.numel[tensor];
      if (next > 0 && batch.blocks + batch.blocks_of(next) > kMaxBlocks) break;
      std::copy_n(table.row(tensor), kColumns, batch.data[next]);
      batch.first_block[next] = batch.blocks;
      batch.blocks += batch.blocks_of(next);
      ++batch.tensors;
    }
    body(batch);
    batch.blocks_before += batch.blocks;
  }
}

// Partial results of a table's blocks, `stride` numbers each, in memory of the device: those of all
// batches, so that one launch after the last of them combines all.
template <int64_t kBlockElements>
class Partials {
 public:
  template <class Context>
  Partials(const Context& context, const TensorTable& table, int stride) : stride_(stride) {
    int64_t blocks = 0;
    for (int64_t t = 0; t < table.tensors(); ++t) {
      blocks += (table.numel[t] + kBlockElements - 1) / kBlockElements;
    }
    // A place more, for the block of a batch that has no elements.
    const int64_t places = (blocks + 1) * stride;
    partials_ =
        static_cast<double*>(context.workspace((places + table.tensors() + 1) * sizeof(double)));
    starts_ = reinterpret_cast<int64_t*>(partials_ + places);
  }

  // Those of the calling block.
  template <class Batch>
  APEX_DEVICE double* of_block(const Batch& batch) const {
    return partials_ + (batch.blocks_before + blockIdx.x) * stride_;
  }

  // Called by all blocks of a batch: writes down where the results of its tensors are, since the
  // launch that combines them knows no batch.
  template <class Batch>
  APEX_DEVICE void locate(const Batch& batch) const {
    if (blockIdx.x != 0) return;
    for (int t = threadIdx.x; t <= batch.tensors; t += kForeachThreads) {
      int64_t block = t < batch.tensors ? batch.first_block[t] : batch.blocks;
      starts_[batch.first_tensor + t] = batch.blocks_before + block;
    }
  }

  // The k-th results of a tensor, combined in a fixed order by all threads of the calling block.
  template <class Combine>
  APEX_DEVICE double combined(int64_t tensor, int k, const Combine& combine) const {
    const int64_t begin = starts_[tensor], end = starts_[tensor + 1];
    double result = 0;
    for (int64_t block = begin + threadIdx.x; block < end; block += kForeachThreads) {
      result = combine(result, partials_[block * stride_ + k]);
    }
    return reduce_row(result, combine);
  }

 private:
  double* partials_;
  int64_t* starts_;  // of each tensor, and one past the last
  int stride_;
};

// Blocks of a launch over a batch: one where it has no elements, which writes down its tensors.
template <class Batch>
dim3 blocks_of(const Batch& batch) {
  return dim3(static_cast<unsigned>(std::max<int64_t>(batch.blocks, 1)));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
