// Lists of tensors as a table of raw pointers, with the checks that make walking memory safe.
#pragma once

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

// What all tensors at one index must have in common, read once per index: lists may be long.
struct Peer {
  const Tensor& tensor;
  int32_t device;
  bool is_cpu;
  int64_t numel;
  bool is_contiguous;
};

// Why `tensor` cannot be walked in step with its peer, or null.
inline const char* problem_of(const Tensor& tensor, const Peer& peer, ScalarType dtype) {
  if (tensor.scalar_type() != dtype) return "all tensors of one list must have one dtype";
  if (tensor.get_device_index() != peer.device || tensor.is_cpu() != peer.is_cpu) {
    return "a tensor is not on the same device as the first tensor";
  }
  if (tensor.numel() != peer.numel) {
    return "size mismatch: tensors at one index must have the same number of elements";
  }
  if (tensor.is_contiguous() && peer.is_contiguous) return nullptr;
  if (is_dense(tensor) && is_dense(peer.tensor) && same_layout(tensor, peer.tensor)) return nullptr;
  return "a tensor was not contiguous in the memory format of its peers";
}

[[noreturn]] inline void fail_at(const char* op, const char* problem, const NamedList& first,
                                 const NamedList& list, size_t i) {
  // What it does not match: its own list's first tensor, or the first list's at this index.
  bool own = list.name == first.name ||
             list.tensors[i].scalar_type() != list.tensors[0].scalar_type();
  const NamedList& other = own ? list : first;
  size_t j = own ? 0 : i;
  fail(op, ": ", problem, ". ", other.name, '[', j, "] is ", describe(other.tensors[j]), ", ",
       list.name, '[', i, "] is ", describe(list.tensors[i]), ".");
}

// Whether tensors without elements get rows of their own: only where rows are results.
enum class Empty { kLeaveOut, kKeep };

// The table of lists that can be walked together; raises, naming the tensor, for others.
inline TensorTable make_table(const char* op, std::initializer_list<NamedList> lists,
                              Empty empty = Empty::kLeaveOut) {
  const NamedList& first = *lists.begin();
  size_t tensors = first.tensors.size();
  TensorTable table;
  table.columns = static_cast<int>(lists.size());
  for (const NamedList& list : lists) {
    check(list.tensors.size() == tensors, op, ": ", list.name, " has ", list.tensors.size(),
          " tensors, but ", first.name, " has ", tensors, ".");
  }
  if (tensors == 0) return table;
  table.data.reserve(tensors * table.columns);
  table.numel.reserve(tensors);

  std::vector<ScalarType> dtypes;
  for (const NamedList& list : lists) dtypes.push_back(list.tensors[0].scalar_type());
  int32_t device = first.tensors[0].get_device_index();
  bool is_cpu = first.tensors[0].is_cpu();
  for (size_t i = 0; i < tensors; ++i) {
    const Tensor& like = first.tensors[i];
    Peer peer{like, device, is_cpu, like.numel(), like.is_contiguous()};
    auto dtype = dtypes.begin();
    for (const NamedList& list : lists) {
      const char* problem = problem_of(list.tensors[i], peer, *dtype++);
      if (problem != nullptr) fail_at(op, problem, first, list, i);
    }
    if (empty == Empty::kLeaveOut && peer.numel == 0) continue;
    for (const NamedList& list : lists) table.data.push_back(list.tensors[i].data_ptr());
    table.numel.push_back(peer.numel);
  }
  return table;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
