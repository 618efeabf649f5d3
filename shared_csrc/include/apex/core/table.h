// Tensor lists as the engines walk them: raw pointers and element counts.
#pragma once

#include <vector>

#include "apex/core/storage.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Tensor lists as raw memory: `columns` pointers and one element count per tensor.
struct TensorTable {
  int columns = 0;
  std::vector<void*> data;       // [tensors, columns]
  std::vector<int64_t> numel;    // [tensors]; no zeros, unless they keep their rows
  std::vector<Storage> storage;  // [columns], for columns of AnyFloat; may be empty without any

  int64_t tensors() const { return static_cast<int64_t>(numel.size()); }
  // Of all N columns.
  template <int N>
  Array<Storage, N> storages() const {
    Array<Storage, N> all;
    for (size_t c = 0; c < N; ++c) all[c] = c < storage.size() ? storage[c] : Storage::kOther;
    return all;
  }
  void* const* row(int64_t tensor) const { return data.data() + tensor * columns; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
