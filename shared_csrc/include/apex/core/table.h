// Tensor lists as the engines walk them: raw pointers and element counts.
#pragma once

#include <vector>

#include "apex/core/config.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Tensor lists as raw memory: `columns` pointers and one element count per tensor.
struct TensorTable {
  int columns = 0;
  std::vector<void*> data;     // [tensors, columns]
  std::vector<int64_t> numel;  // [tensors]; no zeros, unless made for foreach_reduce

  int64_t tensors() const { return static_cast<int64_t>(numel.size()); }
  void* const* row(int64_t tensor) const { return data.data() + tensor * columns; }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
