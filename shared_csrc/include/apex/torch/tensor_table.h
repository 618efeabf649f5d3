// Lists of tensors as a table of raw pointers, with the checks that make walking memory safe.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "apex/core/table.h"
#include "apex/torch/tensor_list.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// One operand of an op: its name for messages and its tensors. An empty optional list is left out.
struct NamedList {
  const char* name;
  const TensorList& tensors;
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
  if (list.tensors.facts(i).dtype != dtype) {
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
  if (problem == nullptr) return;
  fail(op, ": ", problem, ". ", first.name, '[', i, "] is ", describe(a), ", ", list.name, '[', i,
       "] is ", describe(b), ".");
}

// The facts of all lists, tensor by tensor, read a block of tensors at a time.
class FactsReader {
 public:
  explicit FactsReader(std::initializer_list<NamedList> lists)
      : lists_(lists), block_(kBlock * lists.size()) {}

  // Of tensor i of each list; i counts up from 0.
  const TensorFacts* row(size_t i) {
    if (i % kBlock == 0) {
      size_t count = std::min(kBlock, lists_[0].tensors.size() - i);
      for (size_t c = 0; c < lists_.size(); ++c) {
        lists_[c].tensors.read_facts(i, count, block_.data() + c * kBlock);
      }
    }
    return block_.data() + i % kBlock;
  }
  static constexpr size_t kBlock = 32;  // from one column of a row to the next, too

 private:
  std::vector<NamedList> lists_;
  std::vector<TensorFacts> block_;
};

inline Storage storage_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Storage::kFloat;
    case ScalarType::Half:
      return Storage::kHalf;
    case ScalarType::BFloat16:
      return Storage::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return Storage::kFloat8;
    default:
      return Storage::kOther;
  }
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
  if (first.tensors.empty()) return table;
  table.data.reserve(first.tensors.size() * table.columns);
  table.numel.reserve(first.tensors.size());

  std::vector<TensorFacts> references;  // of each list's first tensor
  for (const NamedList& list : lists) {
    references.push_back(list.tensors.facts(0));
    table.storage.push_back(storage_of(list.tensors[0].scalar_type()));
  }
  FactsReader reader(lists);
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    const TensorFacts* row = reader.row(i);
    size_t column = 0;
    int64_t numel = 0;
    bool first_contiguous = true;
    for (const NamedList& list : lists) {
      const TensorFacts& facts = row[column * FactsReader::kBlock];
      if (column == 0) {
        numel = facts.numel;
        first_contiguous = facts.contiguous;
      }
      bool plain = facts.dtype == references[column].dtype && facts.numel == numel &&
                   facts.device_type == references[0].device_type &&
                   facts.device_index == references[0].device_index && facts.contiguous &&
                   first_contiguous;
      if (!plain) {
        check_pair(op, first, list, i, references[column].dtype, references[0].device_index);
      }
      table.data.push_back(facts.data);
#if defined(APEX_EMU)
      emulation::name_operand(facts.data, std::string(list.name) + "[" + std::to_string(i) + "]");
#endif
      ++column;
    }
    if (numel > 0 || empty == Empty::kKeep) {
      table.numel.push_back(numel);
    } else {
      table.data.resize(table.data.size() - table.columns);
    }
  }
  return table;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
