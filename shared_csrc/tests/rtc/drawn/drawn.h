// A kernel whose parameters have holes between them.
#pragma once

#include "apex/core/gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

struct Line {
  float slope;
  double offset;
};

template <class T>
__global__ void draw(T* y, int count, Line line) {
  wait_for_kernels_before();
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) y[i] = static_cast<T>(line.slope * i + line.offset);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
