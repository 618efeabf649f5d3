// Tensors [N, C, *] that lie in memory as [N, *, C].
#pragma once

#include "apex/torch/like.h"

namespace apex {

inline std::vector<int64_t> channels_last_strides(const Tensor& tensor) {
  auto sizes = tensor.sizes();
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  auto take = [&](size_t d) {
    strides[d] = stride;
    stride = product({stride, std::max<int64_t>(sizes[d], 1)});
  };
  take(1);
  for (size_t d = sizes.size(); d-- > 2;) take(d);
  take(0);
  return strides;
}

inline bool is_channels_last(const Tensor& tensor) {
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  const std::vector<int64_t> wanted = channels_last_strides(tensor);
  if (tensor.numel() == 0) return true;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != wanted[d]) return false;
  }
  return true;
}

// A fresh channels-last tensor of this shape and dtype.
inline Tensor empty_channels_last(const Tensor& like) {
  auto sizes = like.sizes();
  return empty_strided(like, {sizes.begin(), sizes.end()}, channels_last_strides(like),
                       like.scalar_type());
}

// The tensor itself, or a channels-last copy.
inline Tensor as_channels_last(const Tensor& tensor) {
  if (is_channels_last(tensor)) return tensor;
  Tensor copy = empty_channels_last(tensor);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), 0));
  return copy;
}

}  // namespace apex
