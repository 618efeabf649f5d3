// Tables of some lists out of all that an op has checked: what one pass over memory reads and
// writes.
#pragma once

#include <initializer_list>

#include "apex/core/table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The same tensors with some of their columns.
inline TensorTable columns_of(const TensorTable& table, std::initializer_list<int> columns) {
  TensorTable chosen;
  chosen.columns = static_cast<int>(columns.size());
  chosen.numel = table.numel;
  for (int column : columns) chosen.storage.push_back(table.storage[column]);
  chosen.data.reserve(columns.size() * table.numel.size());
  for (int64_t tensor = 0; tensor < table.tensors(); ++tensor) {
    for (int column : columns) chosen.data.push_back(table.row(tensor)[column]);
  }
  return chosen;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
