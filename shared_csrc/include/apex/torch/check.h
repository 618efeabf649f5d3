// Checks of op arguments: a failure raises RuntimeError in Python with the given text alone.
#pragma once

#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>

namespace apex {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return "an unsupported dtype";
  }
}

// "[4096, 1024] float32 on device 0", for messages; written only where check() fails.
struct Description {
  const Tensor& tensor;

  friend std::ostream& operator<<(std::ostream& text, const Description& description) {
    const Tensor& tensor = description.tensor;
    if (!tensor.defined()) return text << "None";
    text << '[';
    auto sizes = tensor.sizes();
    for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
    text << "] " << dtype_name(tensor.scalar_type());
    if (tensor.is_cpu()) return text << " on cpu";
    return text << " on device " << tensor.get_device_index();
  }
};

inline Description describe(const Tensor& tensor) { return {tensor}; }

// Whether the storage reaches as far as sizes and strides do. It does not after
// `untyped_storage().resize_(0)`, by which FSDP frees parameters, nor where a view outlives a
// storage that was made smaller. `data_ptr()` tells neither: it adds an offset to whatever is
// there.
inline bool has_memory(const Tensor& tensor) {
  int64_t bytes = 0, last = tensor.numel();
  if (last == 0) return true;
  void* data = nullptr;  // of a meta tensor, whose storage claims to have bytes
  if (aoti_torch_get_data_ptr(tensor.get(), &data) != TORCH_SUCCESS || data == nullptr ||
      aoti_torch_get_storage_size(tensor.get(), &bytes) != TORCH_SUCCESS) {
    return false;
  }
  if (!tensor.is_contiguous()) {
    auto sizes = tensor.sizes();
    auto strides = tensor.strides();
    last = 1;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  }
  int64_t offset = 0;
  aoti_torch_get_storage_offset(tensor.get(), &offset);
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor.get(), &dtype);
  return (offset + last) * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)) <= bytes;
}

// `op` and `name` may each be of several parts: any type that can be written.
template <class Op, class Name>
[[noreturn]] void fail_without_memory(const Op& op, const Name& name, const Tensor& tensor) {
  int64_t bytes = 0;
  if (aoti_torch_get_storage_size(tensor.get(), &bytes) != TORCH_SUCCESS) {
    fail(op, name, " must be a strided tensor with memory of its own, got ", describe(tensor),
         " of another layout.");
  }
  fail(op, name, " is ", describe(tensor), ", but its data is not allocated yet: its storage has ",
       bytes, " bytes, fewer than it needs. Give the storage its memory back first (FSDP and ",
       "untyped_storage().resize_(0) free it).");
}

// The memory of a tensor that has what its sizes say. All kernels take their pointers here, or from
// a TensorTable, which asks the same of whole lists: ci/lint.py lets no other file ask torch.
inline void* memory_of(const Tensor& tensor, const char* name) {
  if (!has_memory(tensor)) fail_without_memory("", name, tensor);
  return tensor.data_ptr();
}

// A tensor argument, required or optional, and its name for messages.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;

  NamedTensor(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const std::optional<Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
};

// Raises for None in place of a tensor and for a tensor without memory; to be called first of all.
inline void check_tensor(const char* op, const NamedTensor& given) {
  if (given.tensor == nullptr) return;
  check(given.tensor->defined(), op, ": ", given.name, " must be a tensor, got None.");
  if (!has_memory(*given.tensor)) {
    fail_without_memory(std::string(op) + ": ", given.name, *given.tensor);
  }
}

inline void check_tensors(const char* op, std::initializer_list<NamedTensor> tensors) {
  for (const NamedTensor& given : tensors) check_tensor(op, given);
}

// The product of sizes; the largest int64_t where it does not fit. Tensors without elements may
// have any sizes, and numbers that stand for a size may be any.
template <class Sizes = std::initializer_list<int64_t>>
int64_t product(const Sizes& sizes) {
  int64_t result = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(result, size, &result)) result = kTooMany;
  }
  return result;
}

}  // namespace apex
