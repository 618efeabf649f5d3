// Whether what an operator writes overlaps what else it reads or writes.
//
// As for `out=` of torch's functions: the same memory at the same place is fine, because kernels
// read an element before they write it; any other overlap makes the result depend on threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "apex/core/table.h"
#include "apex/torch/check.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Lists of optimizer steps are not compared, as torch's fused optimizers do not: some scripts tie
// parameters by one memory.
enum class Use { kNotCompared, kRead, kWritten };

// Memory of one tensor of a table.
struct Interval {
  uintptr_t begin, end;
  int32_t column;
  int64_t row;

  bool operator<(const Interval& other) const { return begin < other.begin; }
};

// Tables that were found free of overlaps by this thread: lists are often those of the last call,
// and to look at 10,000 tensors again takes a tenth of the time that sorting them does.
class CheckedTables {
 public:
  bool holds(uint64_t key) const {
    return std::find(keys_.begin(), keys_.end(), key) != keys_.end();
  }
  void add(uint64_t key) { keys_[next_++ % keys_.size()] = key; }

 private:
  std::array<uint64_t, 32> keys_{};
  size_t next_ = 0;
};

inline uint64_t key_of(const TensorTable& table, const std::vector<int64_t>& facts) {
  auto mix = [](uint64_t key, uint64_t value) {
    key = (key ^ value) * 0x9E3779B97F4A7C15u;
    return key ^ (key >> 29);
  };
  std::array<uint64_t, 4> keys{1, 2, 3, 4};  // independent, so that multiplications overlap
  size_t i = 0;
  for (; i + 4 <= table.data.size(); i += 4) {
    for (size_t k = 0; k < 4; ++k) {
      keys[k] = mix(keys[k], reinterpret_cast<uintptr_t>(table.data[i + k]));
    }
  }
  for (; i < table.data.size(); ++i) {
    keys[0] = mix(keys[0], reinterpret_cast<uintptr_t>(table.data[i]));
  }
  for (size_t row = 0; row < table.numel.size(); ++row) {
    keys[row % 4] = mix(keys[row % 4], static_cast<uint64_t>(table.numel[row]));
  }
  for (int64_t fact : facts) keys[1] = mix(keys[1], static_cast<uint64_t>(fact));
  return mix(mix(mix(keys[0], keys[1]), keys[2]), keys[3]);
}

// Raises if a written tensor overlaps another tensor of the table, unless that is the tensor of
// another list at its index, in the very same memory and read only.
template <class Lists>
void check_overlaps(const char* op, const TensorTable& table, const Lists& lists,
                    const std::vector<int64_t>& itemsizes) {
  std::vector<int> written, read;
  std::vector<int64_t> facts = itemsizes;
  for (const auto& list : lists) {
    int column = static_cast<int>(&list - lists.begin());
    if (list.use == Use::kWritten) written.push_back(column);
    if (list.use == Use::kRead) read.push_back(column);
    facts.push_back(static_cast<int64_t>(list.use));
  }
  if (written.empty()) return;
  // Behind a pointer: the loader has few bytes for such variables, and libraries are many.
  static thread_local auto checked_tables = std::make_unique<CheckedTables>();
  CheckedTables& checked = *checked_tables;
  uint64_t key = key_of(table, facts);
  if (checked.holds(key)) return;

  auto interval = [&](int64_t row, int column) {
    auto begin = reinterpret_cast<uintptr_t>(table.row(row)[column]);
    return Interval{begin, begin + static_cast<uintptr_t>(table.numel[row] * itemsizes[column]),
                    column, row};
  };
  auto name = [&](const Interval& found) {
    const auto& list = lists.begin()[found.column];
    bool has_all_rows = table.numel.size() == list.tensors.size();  // or none of empty tensors
    size_t index = 0;
    for (int64_t row = 0; index < list.tensors.size(); ++index) {
      bool has_row = has_all_rows || list.tensors.facts(op, list.name, index).numel > 0;
      if (has_row && row++ == found.row) break;
    }
    std::ostringstream text;
    text << list.name << '[' << index << "] (" << describe(list.tensors[index]) << ')';
    return text.str();
  };
  auto refuse = [&](const Interval& output, const Interval& other) {
    fail(op, ": ", name(output), " is written and shares memory with ", name(other),
         ", other than as the same elements at the same index. Results would depend on the order "
         "of writing; use memory of its own.");
  };
  std::vector<Interval> outputs, inputs;
  outputs.reserve(table.numel.size() * written.size());
  for (int64_t row = 0; row < table.tensors(); ++row) {
    if (table.numel[row] == 0) continue;
    for (int column : written) outputs.push_back(interval(row, column));
    for (int column : read) {
      Interval input = interval(row, column);
      bool is_output = std::any_of(written.begin(), written.end(), [&](int other) {
        return table.row(row)[other] == table.row(row)[column] &&
               itemsizes[other] == itemsizes[column];
      });
      if (!is_output) inputs.push_back(input);
    }
  }
  auto sort = [](std::vector<Interval>& all) {
    if (!std::is_sorted(all.begin(), all.end())) std::sort(all.begin(), all.end());
  };
  sort(outputs);
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i].begin < outputs[i - 1].end) refuse(outputs[i], outputs[i - 1]);
  }
  sort(inputs);
  size_t next = 0;  // the first output that ends after the begin of the input
  for (const Interval& input : inputs) {
    while (next < outputs.size() && outputs[next].end <= input.begin) ++next;
    if (next < outputs.size() && outputs[next].begin < input.end) refuse(outputs[next], input);
  }
  checked.add(key);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
