// An argument Tensor[] of an operator, read without turning every element into an object.
//
// torch's own conversion makes a std::vector<Tensor>: for lists of 10,000 tensors its allocations,
// two per tensor, cost more than the kernel.
#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "apex/torch/check.h"

namespace apex {

// What walking a tensor's memory needs to know of it.
struct TensorFacts {
  void* data;
  int64_t numel, offset, storage_bytes;
  int32_t dtype, device_index;
  bool contiguous;
};

class TensorList {
 public:
  // Takes ownership of the list and of the tensor handles in it.
  explicit TensorList(StableListHandle list) {
    size_t size = 0;
    bool failed = torch_list_size(list, &size) != TORCH_SUCCESS;
    handles_.reserve(size);
    for (size_t i = 0; i < size && !failed; ++i) {
      StableIValue element;
      failed = torch_list_get_item(list, i, &element) != TORCH_SUCCESS;
      if (!failed) handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
    torch_delete_list(list);
    if (failed) fail("a list of tensors could not be read.");
  }
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  TensorList(const TensorList&) = delete;
  ~TensorList() {
    for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }

  // A handle of its own on the same tensor; for the few tensors that need more than facts().
  Tensor operator[](size_t index) const {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handles_[index], &handle));
    return Tensor(handle);
  }

  // `op` and `name`, of this list, are for the message if it is None or not dense memory.
  TensorFacts facts(const char* op, const char* name, size_t index) const {
    TensorFacts facts{};
    bool is_defined = false;
    aoti_torch_is_defined(handles_[index], &is_defined);
    check(is_defined, op, ": ", name, '[', index, "] must be a tensor, got None.");
    check(read_facts(index, 1, &facts) == 1, op, ": ", name, '[', index,
          "] must be a strided tensor with memory of its own, got one of another layout.");
    return facts;
  }

  // Facts of `count` tensors from `begin` on: one fact of all, then the next. Tensors are spread
  // over the heap, and this way the processor waits for several of them at once: half the time.
  // Returns how many have all facts: one that is not dense memory has no data.
  size_t read_facts(size_t begin, size_t count, TensorFacts* facts) const {
    size_t complete = count;
    auto read = [&](auto get, auto fact) {
      for (size_t i = 0; i < count; ++i) {
        bool is_read = get(handles_[begin + i], &(facts[i].*fact)) == TORCH_SUCCESS;
        if (!is_read && i < complete) complete = i;
      }
    };
    read(aoti_torch_get_dtype, &TensorFacts::dtype);
    read(aoti_torch_get_device_index, &TensorFacts::device_index);
    read(aoti_torch_get_numel, &TensorFacts::numel);
    read(aoti_torch_get_storage_offset, &TensorFacts::offset);
    read(aoti_torch_is_contiguous, &TensorFacts::contiguous);
    read(aoti_torch_get_storage_size, &TensorFacts::storage_bytes);
    read(aoti_torch_get_data_ptr, &TensorFacts::data);
    return complete;
  }

#if defined(APEX_RELEASE_OPERAND)
  // A tool that watches memory knows it for as long as a handle that showed it; these outlive the
  // op.
  void end_of_op() const {
    for (AtenTensorHandle handle : handles_) APEX_RELEASE_OPERAND(handle);
  }
#endif

 private:
  std::vector<AtenTensorHandle> handles_;
};

}  // namespace apex

// Lets TORCH_BOX unpack Tensor[] as TensorList.
HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<apex::TensorList> {
  static apex::TensorList call(StableIValue value, uint64_t, bool) {
    return apex::TensorList(to<StableListHandle>(value));
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)
