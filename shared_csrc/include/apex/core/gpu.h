// The GPU runtime layer that engines use: groups of lanes, shuffles, shared memory and launches.
//
// A "group" is 32 lanes on every GPU: half a wavefront on CDNA, a warp elsewhere. No code asks for
// the width of a warp, which HIP does not know at compile time. Where blockDim.x is a smaller power
// of two, a group is the lanes of one threadIdx.y.
#pragma once

#include "apex/core/gpu_shapes.h"
#include "apex/core/types.h"

// Shared memory of a block: APEX_SHARED(float, tile, [8][32]) declares `float tile[8][32]`. Types
// have neither constructors nor initializers, and no commas outside of brackets.
#if !defined(APEX_SHARED)
#define APEX_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define APEX_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

inline constexpr int kGroupLanes = 32;

#if defined(APEX_CUDA) || defined(APEX_HIP)

// Among the given lanes of 32, a bit each.
template <class T>
APEX_DEVICE T shuffle_lanes(unsigned lanes, T value, int mask) {
#if defined(APEX_CUDA)
  return __shfl_xor_sync(lanes, value, mask, kGroupLanes);
#else
  return __shfl_xor(value, mask, kGroupLanes);
#endif
}

APEX_DEVICE void sync_lanes(unsigned lanes) {
#if defined(APEX_CUDA)
  __syncwarp(lanes);
#else
  __builtin_amdgcn_wave_barrier();  // lanes of a wavefront run in step
#endif
}

#if !defined(APEX_RTC)
// `cluster`: of as many blocks side by side, see apex/rtc/host.h.
template <auto kernel, unsigned cluster = 1, class... Arguments>
void launch(dim3 grid, dim3 block, size_t shared_bytes, gpu_stream stream,
            const Arguments&... arguments) {
#if defined(APEX_RTC_HOST)
  RtcLaunch<kernel>::run(kDependentLaunches, cluster, grid, block, shared_bytes, stream,
                         arguments...);
#else
  static_assert(cluster == 1, "of kernels that NVRTC compiles alone");
  // clang-format off: it would put spaces into >>>
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  // clang-format on
#endif
}
#endif

#endif  // else whoever brought the GPU has brought these

// First in every kernel, whose launch may not have waited for those before it: they end here, and
// what they wrote is there. Those behind may begin, and wait for this one in turn.
APEX_DEVICE void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDependentLaunches) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
#endif
}

// Lanes of a thread's group.
APEX_DEVICE int group_lanes() {
  return blockDim.x < kGroupLanes ? static_cast<int>(blockDim.x) : kGroupLanes;
}

// Those of 32 lanes that are of a thread's group, a bit each.
APEX_DEVICE unsigned group_mask() {
  if (blockDim.x >= kGroupLanes) return 0xffffffffu;
  return ((1u << blockDim.x) - 1) << (threadIdx.y * blockDim.x % kGroupLanes);
}

// Among `lanes` of 32, those of the thread's group.
template <class T>
APEX_DEVICE T shuffle_xor(T value, int mask, unsigned lanes) {
  return shuffle_lanes(lanes, value, mask);
}

template <class T, int N>
APEX_DEVICE Array<T, N> shuffle_xor(const Array<T, N>& values, int mask, unsigned lanes) {
  Array<T, N> result;
#pragma unroll
  for (int n = 0; n < N; ++n) result[n] = shuffle_lanes(lanes, values[n], mask);
  return result;
}

APEX_DEVICE void sync_group() { sync_lanes(group_mask()); }

struct Add {
  template <class T>
  APEX_HD T operator()(T a, T b) const {
    return a + b;
  }
  template <class T, int N>
  APEX_HD Array<T, N> operator()(Array<T, N> a, const Array<T, N>& b) const {
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] += b[n];
    return a;
  }
};

struct Max {
  template <class T>
  APEX_HD T operator()(T a, T b) const {
    return larger(a, b);
  }
};

// The reduction over the group's lanes, in all of them.
template <class T, class Op>
APEX_DEVICE T reduce_group(T value, Op op) {
  for (int mask = group_lanes() / 2; mask > 0; mask /= 2) {
    value = op(value, shuffle_xor(value, mask, group_mask()));
  }
  return value;
}

// The same over the first `lanes` of a whole group, a power of two; those behind them take part.
// That compilers know who does makes a shuffle one instruction.
template <class T, class Op>
APEX_DEVICE T reduce_lanes(T value, Op op, int lanes) {
#pragma unroll
  for (int mask = kGroupLanes / 2; mask > 0; mask /= 2) {
    const T other = shuffle_xor(value, mask, 0xffffffffu);
    if (mask < lanes) value = op(value, other);
  }
  return value;
}

// The reduction over threads with one threadIdx.y, in all of them. blockDim.x is one group, which
// needs no barrier, or a multiple of 32; then blockDim.y must be 1.
template <class T, class Op>
APEX_DEVICE T reduce_row(T value, Op op) {
  value = reduce_group(value, op);
  if (blockDim.x <= kGroupLanes) return value;
  APEX_SHARED(T, partials, [32]);  // at most 1,024 threads, 32 groups
  int group = threadIdx.x / kGroupLanes, groups = blockDim.x / kGroupLanes;
  if (threadIdx.x % kGroupLanes == 0) partials[group] = value;
  __syncthreads();
  T result = partials[0];
  for (int i = 1; i < groups; ++i) result = op(result, partials[i]);
  __syncthreads();  // before the next reduction writes partials
  return result;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
