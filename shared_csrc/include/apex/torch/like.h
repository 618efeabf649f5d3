// Tensors like another: made, and checked.
#pragma once

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "apex/torch/check.h"

namespace apex {

// The stable ABI drops the text of a call that fails (until torch 2.13), so it is written anew, in
// the words by which scripts tell lack of memory from other errors. It stays a RuntimeError: the
// ABI has no way to raise torch.OutOfMemoryError.
[[noreturn]] inline void fail_to_allocate(int64_t bytes, bool on_cpu) {
  if (on_cpu) {
    fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
         " bytes for a kernel's result or workspace (out of memory).");
  }
  fail("CUDA out of memory. Tried to allocate ", bytes,
       " bytes for a kernel's result or workspace. (If memory is free, an earlier kernel failed; "
       "CUDA_LAUNCH_BLOCKING=1 shows which.)");
}

// A fresh tensor on the device of `like`. torch::stable::new_empty() finds its operator by name at
// every call, which takes longer than normalizing a few rows.
inline Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes,
                            const std::vector<int64_t>& strides, ScalarType dtype) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  auto status = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                         strides.data(), static_cast<int32_t>(dtype), device_type,
                                         like.get_device_index(), &handle);
  if (status != TORCH_SUCCESS) {
    int64_t bytes = aoti_torch_dtype_element_size(static_cast<int32_t>(dtype));
    for (int64_t size : sizes) bytes = product({bytes, std::max<int64_t>(size, 1)});
    fail_to_allocate(bytes, like.is_cpu());
  }
  return Tensor(handle);
}

// The same, contiguous.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride = product({stride, std::max<int64_t>(sizes[d], 1)});
  }
  return empty_strided(like, sizes, strides, dtype);
}

inline Tensor empty_like(const Tensor& like, ScalarType dtype) {
  auto sizes = like.sizes();
  return empty(like, {sizes.begin(), sizes.end()}, dtype);
}

// The tensor itself, or a contiguous copy.
inline Tensor as_contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  Tensor copy = empty_like(tensor, tensor.scalar_type());
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), 0));
  return copy;
}

inline bool is_contiguous_near(const Tensor& tensor, ScalarType dtype, const Tensor& like) {
  return tensor.is_contiguous() && tensor.scalar_type() == dtype &&
         tensor.is_cpu() == like.is_cpu() && tensor.get_device_index() == like.get_device_index();
}

// Raises where two contiguous tensors share memory: one is written while the other is read.
inline void check_apart(const char* op, const NamedTensor& written, const NamedTensor& other) {
  if (written.tensor == nullptr || other.tensor == nullptr) return;
  check_tensors(op, {written, other});
  auto begin = [](const NamedTensor& given) {
    return static_cast<const char*>(memory_of(*given.tensor, given.name));
  };
  auto end = [&](const NamedTensor& given) {
    const auto dtype = static_cast<int32_t>(given.tensor->scalar_type());
    return begin(given) + given.tensor->numel() * aoti_torch_dtype_element_size(dtype);
  };
  check(end(written) <= begin(other) || end(other) <= begin(written), op, ": ", written.name,
        ", which is written to, shares memory with ", other.name, "; give a copy of one.");
}

// Raises unless `given`, of any shape, has memory for so many elements of this dtype, contiguous,
// on the device of `like`. For vectors; where rows are walked in step, shapes must be the same.
inline void check_like(const char* op, const NamedTensor& given, int64_t numel, ScalarType dtype,
                       const NamedTensor& like) {
  if (given.tensor == nullptr) return;
  check_tensor(op, given);
  check(given.tensor->numel() == numel && is_contiguous_near(*given.tensor, dtype, *like.tensor),
        op, ": ", given.name, " must be contiguous, with ", numel, " elements of ",
        dtype_name(dtype), " on the device of ", like.name, "; got ", describe(*given.tensor), ", ",
        like.name, " is ", describe(*like.tensor), ".");
}

// The same for a tensor of these sizes.
template <class Sizes>
void check_sizes(const char* op, const NamedTensor& given, const Sizes& sizes, ScalarType dtype,
                 const NamedTensor& like) {
  if (given.tensor == nullptr) return;
  check_tensor(op, given);
  auto own = given.tensor->sizes();
  if (std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()) &&
      is_contiguous_near(*given.tensor, dtype, *like.tensor)) {
    return;
  }
  std::ostringstream wanted;
  const char* comma = "";
  for (int64_t size : sizes) wanted << std::exchange(comma, ", ") << size;
  fail(op, ": ", given.name, " must be contiguous, with ", product(sizes), " elements of ",
       dtype_name(dtype), " in shape [", wanted.str(), "], on the device of ", like.name, "; got ",
       describe(*given.tensor), ", ", like.name, " is ", describe(*like.tensor), ".");
}

}  // namespace apex
