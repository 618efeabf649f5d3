// Lists of tensors on a GPU: batches that fit into kernel parameters, and the partial results of
// their blocks.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "apex/core/gpu.h"
#include "apex/core/gpu_shapes.h"
#include "apex/core/table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Kernel parameters may take 4 KiB on every GPU, and 32,764 bytes where a context says so; some
// room is for the functor.
inline constexpr size_t kTableBytes = 3584;
inline constexpr size_t kLongTableBytes = 31744;

// A batch of tensors by value, each a range of blocks of kBlockElements. Travelling as a kernel
// parameter it needs no copy to the device, no synchronisation, and is safe under graph capture.
template <int kOfColumns, int64_t kBlockElements, bool kIsLong>
struct ForeachBatch {
  static constexpr int kColumns = kOfColumns;
  static constexpr bool kLong = kIsLong;
  static constexpr size_t kBytes = kLong ? kLongTableBytes : kTableBytes;
  static constexpr int kTensors =
      static_cast<int>((kBytes - sizeof(int)) / (kColumns * sizeof(void*) + 2 * sizeof(int)));
  void* data[kTensors][kColumns];
  int first_block[kTensors + 1];  // prefix sum of blocks
  int last_elements[kTensors];    // of each tensor's last block
  int tensors;
  int64_t first_tensor;   // row of the table that data[0] is
  int64_t blocks_before;  // of the batches before
  Array<Storage, kColumns> storage;

  APEX_HD int blocks() const { return first_block[tensors]; }

  // The tensor that the calling block works on.
  APEX_DEVICE int tensor_of_block() const {
    int low = 0, high = tensors - 1;
    while (low < high) {
      int middle = (low + high + 1) / 2;
      if (first_block[middle] <= static_cast<int>(blockIdx.x)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // The calling block's elements of this tensor: where they begin, and how many there are.
  APEX_DEVICE int64_t begin_of_block(int tensor) const {
    return int64_t{static_cast<int>(blockIdx.x) - first_block[tensor]} * kBlockElements;
  }
  APEX_DEVICE int elements_of_block(int tensor) const {
    const int behind = first_block[tensor + 1] - static_cast<int>(blockIdx.x);
    if (behind > 1) return static_cast<int>(kBlockElements);
    return behind == 1 ? last_elements[tensor] : 0;  // 0: a batch without elements
  }

  // body(tensor, begin, views...) with a view of each column.
  template <class... Views, class Body>
  APEX_DEVICE void with_views(const Body& body) const {
    with_views<Views...>(std::index_sequence_for<Views...>{}, body);
  }
  template <class... Views, size_t... I, class Body>
  APEX_DEVICE void with_views(std::index_sequence<I...>, const Body& body) const {
    const int tensor = tensor_of_block();
    const int64_t begin = begin_of_block(tensor);
    body(tensor, begin, Views(data[tensor][I], begin, storage[I])...);
  }

  // Whether there was room for one more tensor, which is then the last.
  bool add(void* const* columns, int64_t numel) {
    const int64_t blocks = (numel + kBlockElements - 1) / kBlockElements;
    const int64_t end = first_block[tensors] + blocks;
    if (tensors == kTensors || (tensors > 0 && end > std::numeric_limits<int>::max())) return false;
    std::copy_n(columns, kColumns, data[tensors]);
    last_elements[tensors] = static_cast<int>(numel - (blocks - 1) * kBlockElements);
    first_block[++tensors] = static_cast<int>(end);
    return true;
  }
};

// Calls body(batch) for batches of the table's tensors, in order.
template <class Batch, class Body>
void for_each_batch_of(const TensorTable& table, const Body& body) {
  Batch batch;
  batch.storage = table.storages<Batch::kColumns>();
  batch.blocks_before = 0;
  batch.first_block[0] = 0;
  for (int64_t tensor = 0; tensor < table.tensors();) {
    batch.first_tensor = tensor;
    batch.tensors = 0;
    while (tensor < table.tensors() && batch.add(table.row(tensor), table.numel[tensor])) ++tensor;
    body(batch);
    batch.blocks_before += batch.blocks();
  }
}

// Long batches where they are fewer: a launch copies all of its parameters.
template <int kColumns, int64_t kBlockElements, class Context, class Body>
void for_each_batch(const Context& context, const TensorTable& table, const Body& body) {
  using Short = ForeachBatch<kColumns, kBlockElements, false>;
  if constexpr (requires { context.takes_long_parameters(); }) {
    using Long = ForeachBatch<kColumns, kBlockElements, true>;
    if (table.tensors() > Short::kTensors && context.takes_long_parameters()) {
      return for_each_batch_of<Long>(table, body);
    }
  }
  for_each_batch_of<Short>(table, body);
}

// The first `count` numbers, kStride apart, combined in a fixed order by all threads of the calling
// block, which load several before they use the first. 0 changes no result.
template <int kStride, class Combine>
APEX_DEVICE double combined_numbers(const double* numbers, int64_t count, const Combine& combine) {
  constexpr int kStep = kForeachThreads * kStride;
  const double* from = numbers + threadIdx.x * kStride;
  double result = 0;
#pragma unroll 1
  for (int left = static_cast<int>(count) - static_cast<int>(threadIdx.x); left > 0;
       left -= kRowLoads * kForeachThreads, from += kRowLoads * kStep) {
    double own[kRowLoads];
#pragma unroll
    for (int u = 0; u < kRowLoads; ++u) own[u] = u * kForeachThreads < left ? from[u * kStep] : 0;
#pragma unroll
    for (int u = 0; u < kRowLoads; ++u) result = combine(result, own[u]);
  }
  return reduce_row(result, combine);
}

// Partial results of a table's blocks, `stride` numbers each, in memory of the device: those of all
// batches, so that one launch after the last of them combines all.
template <int64_t kBlockElements>
class Partials {
 public:
  template <class Context>
  Partials(const Context& context, const TensorTable& table, int stride) : stride_(stride) {
    for (int64_t numel : table.numel) blocks_ += (numel + kBlockElements - 1) / kBlockElements;
    // A place more, for the block of a batch that has no elements.
    const int64_t places = (blocks_ + 1) * stride;
    partials_ =
        static_cast<double*>(context.workspace((places + table.tensors() + 1) * sizeof(double)));
    starts_ = reinterpret_cast<int64_t*>(partials_ + places);
  }

  int64_t blocks() const { return blocks_; }
  double* all() const { return partials_; }

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
      starts_[batch.first_tensor + t] = batch.blocks_before + batch.first_block[t];
    }
  }

  // The k-th results of a tensor, combined in a fixed order by all threads of the calling block.
  template <int kStride, class Combine>
  APEX_DEVICE double combined(int64_t tensor, int k, const Combine& combine) const {
    const int64_t begin = starts_[tensor], count = starts_[tensor + 1] - begin;
    return combined_numbers<kStride>(partials_ + begin * kStride + k, count, combine);
  }

 private:
  double* partials_;
  int64_t* starts_;  // of each tensor, and one past the last
  int64_t blocks_ = 0;
  int stride_;
};

// Blocks of a launch over a batch: one where it has no elements, which writes down its tensors.
template <class Batch>
dim3 blocks_of(const Batch& batch) {
  return dim3(static_cast<unsigned>(std::max(batch.blocks(), 1)));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
