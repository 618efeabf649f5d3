// Tensors like another: made, and checked.
#pragma once

#include <algorithm>
#include <vector>

#include "apex/torch/check.h"

namespace apex {

// A fresh contiguous tensor on the device of `like`. torch::stable::new_empty() finds its operator
// by name at every call, which takes longer than normalizing a few rows.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), static_cast<int32_t>(dtype),
                                                  device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_like(const Tensor& like, ScalarType dtype) {
  auto sizes = like.sizes();
  return empty(like, {sizes.begin(), sizes.end()}, dtype);
}

// Raises unless `tensor` has so many elements of this dtype, contiguous, on the device of `x`.
inline void check_like(const char* op, const char* name, const Tensor& tensor, int64_t numel,
                       ScalarType dtype, const Tensor& x) {
  check(tensor.numel() == numel && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
            tensor.is_cpu() == x.is_cpu() && tensor.get_device_index() == x.get_device_index(),
        op, ": ", name, " must be contiguous, with ", numel, " elements of ", dtype_name(dtype),
        " on the device of x; got ", describe(tensor), ", x is ", describe(x), ".");
}

}  // namespace apex
