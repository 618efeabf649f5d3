// Lists of tensors as a table of raw pointers, with the checks that make walking memory safe.
#pragma once

#include <algorithm>
#include <initializer_list>

#include <torch/csrc/stable/ops.h>

#include "apex/core/table.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/overlap.h"
#include "apex/torch/tensor_list.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// One operand of an op: its name for messages and its tensors. An empty optional list is left out.
struct NamedList {
  const char* name;
  const TensorList& tensors;
  Use use = Use::kNotCompared;
};

// True when the elements fill memory without gaps or overlaps, in whatever order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  int64_t expected = 1;
  // Tensors have few dimensions: take the dimension with the expected stride until none is left.
  std::vector<bool> used(sizes.size(), false);
  for (size_t done = 0; done < sizes.size(); ++done) {
    size_t next = sizes.size();
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (!used[d] && (sizes[d] == 1 || strides[d] == expected)) {
        next = d;
        break;
      }
    }
    if (next == sizes.size()) return false;
    used[next] = true;
    expected *= sizes[next];
  }
  return true;
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  auto sizes_a = a.sizes();
  auto sizes_b = b.sizes();
  if (sizes_a.size() != sizes_b.size()) return false;
  for (size_t d = 0; d < sizes_a.size(); ++d) {
    if (sizes_a[d] != sizes_b[d]) return false;
    if (sizes_a[d] > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Raises unless tensor i of `list` can be walked in step with tensor i of `first`.
inline void check_pair(const char* op, const NamedList& first, const NamedList& list, size_t i,
                       int32_t dtype, int32_t device) {
  Tensor a = first.tensors[i], b = list.tensors[i];
  const char* problem = nullptr;
  if (list.tensors.facts(op, list.name, i).dtype != dtype) {
    fail(op, ": all tensors of one list must have one dtype. ", list.name, "[0] is ",
         describe(list.tensors[0]), ", ", list.name, '[', i, "] is ", describe(b), ".");
  } else if (b.get_device_index() != device || b.is_cpu() != a.is_cpu()) {
    problem = "a tensor is not on the same device as the first tensor";
  } else if (b.numel() != a.numel()) {
    problem = "size mismatch: tensors at one index must have the same number of elements";
  } else if (!(a.is_contiguous() && b.is_contiguous()) &&
             !(is_dense(a) && is_dense(b) && same_layout(a, b))) {
    problem = "a tensor was not contiguous in the memory format of its peers";
  }
  if (problem == nullptr) {
    std::string index = '[' + std::to_string(i) + ']';
    if (!has_memory(a)) fail_without_memory(std::string(op) + ": ", first.name + index, a);
    if (!has_memory(b)) fail_without_memory(std::string(op) + ": ", list.name + index, b);
    return;
  }
  fail(op, ": ", problem, ". ", first.name, '[', i, "] is ", describe(a), ", ", list.name, '[', i,
       "] is ", describe(b), ".");
}

// Whether tensors without elements get rows of their own: only where rows are results.
enum class Empty { kLeaveOut, kKeep };

inline TensorTable make_table(const char* op, std::initializer_list<NamedList> lists,
                              Empty empty = Empty::kLeaveOut) {
  const NamedList& first = *lists.begin();
  TensorTable table;
  for (const NamedList& list : lists) {
    check(list.tensors.size() == first.tensors.size(), op, ": ", list.name, " has ",
          list.tensors.size(), " tensors, but ", first.name, " has ", first.tensors.size(), ".");
    ++table.columns;
  }
  size_t count = first.tensors.size(), columns = lists.size();
  if (count == 0) return table;
  std::vector<TensorFacts> references;  // of each list's first tensor
  std::vector<int64_t> itemsizes;       // likewise
  for (const NamedList& list : lists) {
    references.push_back(list.tensors.facts(op, list.name, 0));
    itemsizes.push_back(
        static_cast<int64_t>(aoti_torch_dtype_element_size(references.back().dtype)));
    table.storage.push_back(storage_of(list.tensors[0].scalar_type()));
  }

  table.data.resize(count * columns);
  table.numel.resize(count);
  std::vector<char> plain(count, true);  // whether a row needs no closer look
  // Nothing is raised here: threads do it.
  auto read = [&](int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 32;  // from one column of a row to the next, too
    TensorFacts block[kBlock] = {};
    for (int64_t i = begin; i < end; i += kBlock) {
      size_t rows = static_cast<size_t>(std::min(kBlock, end - i));
      for (size_t c = 0; c < columns; ++c) {
        size_t complete = lists.begin()[c].tensors.read_facts(i, rows, block);
        for (size_t k = 0; k < rows; ++k) {
          const TensorFacts& facts = block[k];
          size_t row = i + k;
          if (c == 0) table.numel[row] = facts.numel;
          table.data[row * columns + c] = facts.data;
          // A meta tensor has the index of the CPU, but no data; to ask for each tensor's type of
          // device would take as long as to ask for its storage.
          plain[row] &= k < complete && facts.dtype == references[c].dtype &&
                        facts.numel == table.numel[row] && facts.contiguous &&
                        facts.device_index == references[0].device_index &&
                        (facts.numel == 0 ||
                         (facts.data != nullptr &&
                          (facts.offset + facts.numel) * itemsizes[c] <= facts.storage_bytes));
        }
      }
    }
  };
  constexpr int64_t kGrain = 1024;  // tensors whose facts are worth a thread
  if (count <= kGrain) {
    read(0, count);
  } else {
    torch::stable::parallel_for(0, count, kGrain, read);
  }

  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    for (size_t c = 0; c < columns && !plain[i]; ++c) {
      const NamedList& list = lists.begin()[c];
      list.tensors.facts(op, list.name, i);  // raises if it has none
      check_pair(op, first, list, i, references[c].dtype, references[0].device_index);
    }
    if (table.numel[i] == 0 && empty == Empty::kLeaveOut) continue;
    for (size_t c = 0; c < columns; ++c) {
      void* data = table.data[i * columns + c];
      table.data[kept * columns + c] = data;
#if defined(APEX_NAME_OPERAND)
      const char* name = lists.begin()[c].name;
      APEX_NAME_OPERAND(data, std::string(name) + "[" + std::to_string(i) + "]");
#endif
    }
    table.numel[kept++] = table.numel[i];
  }
  table.data.resize(kept * columns);
  table.numel.resize(kept);
  check_overlaps(op, table, lists, itemsizes);
  return table;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
