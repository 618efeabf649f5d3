// Planted bugs of order: barriers that are missing or divergent, races, values never written.
#include "planted.h"

namespace apex {
namespace {

// The sum of 64 values by a tree in shared memory.
template <bool kBarrier>
__global__ void tree_sum(float* y, const float* x) {
  APEX_SHARED(float, sums, [64]);
  sums[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    if (kBarrier) __syncthreads();
  }
  if (threadIdx.x == 0) *y = sums[0];
}

template <bool kBroken>
void missing_barrier() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 1);
  run(tree_sum<!kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()));
  expect(y[0] == 189.0f, "the sum of x");
}

// As reduce_row() would be without its second barrier.
template <bool kBroken>
__global__ void two_rounds(float* y) {
  APEX_SHARED(float, part, );
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) part = round + 1.0f;
    __syncthreads();
    y[threadIdx.x] = part;
    if (!kBroken) __syncthreads();
  }
}

template <bool kBroken>
void missing_second_barrier() {
  Fresh<float> y("y", 64);
  run(two_rounds<kBroken>, dim3(1), dim3(64), y.data());
}

template <bool kBroken>
__global__ void pass_within_warp(float* y, const float* x) {
  APEX_SHARED(float, row, [32]);
  row[threadIdx.x] = x[threadIdx.x];
  if (!kBroken) sync_group();
  y[threadIdx.x] = row[31 - threadIdx.x];
}

template <bool kBroken>
void missing_warp_barrier() {
  Values<float> x("x", 32);
  Fresh<float> y("y", 32);
  run(pass_within_warp<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()));
}

template <bool kBroken>
__global__ void barrier_in_branch(float* y, const float* x) {
  APEX_SHARED(float, row, [64]);
  row[threadIdx.x] = x[threadIdx.x];
  if (!kBroken || threadIdx.x < 16) __syncthreads();
  if (threadIdx.x < 16) y[threadIdx.x] = row[threadIdx.x];
}

template <bool kBroken>
void divergent_barrier() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 16);
  run(barrier_in_branch<kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()));
}

template <bool kBroken>
__global__ void two_barriers(float* y) {
  if (kBroken && threadIdx.x % 2 == 1) {
    y[threadIdx.x] = 1.0f;
    __syncthreads();
  } else {
    y[threadIdx.x] = 2.0f;
    __syncthreads();
  }
}

template <bool kBroken>
void barriers_at_two_places() {
  Fresh<float> y("y", 64);
  run(two_barriers<kBroken>, dim3(1), dim3(64), y.data());
}

// Each block adds its part to one output.
template <bool kBroken>
__global__ void add_to_one(float* y, const float* x) {
  if (threadIdx.x != 0) return;
  if (kBroken) {
    *y += x[blockIdx.x];
  } else {
    atomicAdd(y, x[blockIdx.x]);
  }
}

template <bool kBroken>
void race_between_blocks_on_one_output() {
  Values<float> x("x", 8), y("y", 1);
  run(add_to_one<kBroken>, dim3(8), dim3(32), y.data(), static_cast<const float*>(x.data()));
  expect(y[0] == 21.0f, "the sum of x");
}

template <bool kBroken>
__global__ void halo(float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = static_cast<float>(i);
  if (kBroken && threadIdx.x == 31) y[i + 1] = -1.0f;  // the next block's
}

template <bool kBroken>
void blocks_that_overlap() {
  Fresh<float> y("y", 65);
  run(halo<kBroken>, dim3(2), dim3(32), y.data());
}

template <bool kBroken>
__global__ void in_place_reverse(float* x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, other = 127 - i;
  if (kBroken) {
    x[i] = x[other];
  } else if (i < other) {
    float value = x[other];
    x[other] = x[i];
    x[i] = value;
  }
}

template <bool kBroken>
void read_of_what_another_block_writes() {
  Values<float> x("x", 128);
  run(in_place_reverse<kBroken>, dim3(2), dim3(64), x.data());
}

// All threads that find something write the same value: that is no race. Different ones are.
template <bool kBroken>
__global__ void set_flag(int* flag, const float* x) {
  if (x[blockIdx.x * blockDim.x + threadIdx.x] > 3.0f) *flag = kBroken ? 1 + threadIdx.x : 1;
}

template <bool kBroken>
void flag_with_different_values() {
  Values<float> x("x", 64);
  Values<int> flag("flag", 1);
  run(set_flag<kBroken>, dim3(2), dim3(32), flag.data(), static_cast<const float*>(x.data()));
}

template <bool kBroken>
__global__ void histogram(int* counts, const float* x) {
  APEX_SHARED(int, bins, [8]);
  if (!kBroken && threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[static_cast<int>(x[threadIdx.x])], 1);
  __syncthreads();
  if (threadIdx.x < 8) counts[threadIdx.x] = bins[threadIdx.x];
}

template <bool kBroken>
void uninitialized_accumulator() {
  Values<float> x("x", 64);
  Fresh<int> counts("counts", 8);
  run(histogram<kBroken>, dim3(1), dim3(64), counts.data(), static_cast<const float*>(x.data()));
}

__global__ void add_in_place(float* y) { y[threadIdx.x] += 1.0f; }
__global__ void clear(float* y) { y[threadIdx.x] = 0.0f; }

template <bool kBroken>
void uninitialized_output() {
  Fresh<float> y("y", 32);
  if (!kBroken) run(clear, dim3(1), dim3(32), y.data());
  run(add_in_place, dim3(1), dim3(32), y.data());
}

// Sums of floats depend on their order, and so on that of threads.
template <bool kBroken>
__global__ void float_sum(float* y, const float* x) {
  if (kBroken) {
    atomicAdd(y, x[threadIdx.x]);
  } else if (threadIdx.x == 0) {
    for (unsigned i = 0; i < blockDim.x; ++i) *y += x[i];
  }
}

template <bool kBroken>
void sum_that_depends_on_the_order() {
  Values<float> x("x", 64), y("y", 1);
  for (int i = 0; i < 64; ++i) x[i] = 1.0f / (3 + i);
  run(float_sum<kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()));
}

}  // namespace

#define APEX_PLANTED(name) {#name, name<true>, name<false>}
const std::vector<Case> kOrderCases = {APEX_PLANTED(missing_barrier),
                                       APEX_PLANTED(missing_second_barrier),
                                       APEX_PLANTED(missing_warp_barrier),
                                       APEX_PLANTED(divergent_barrier),
                                       APEX_PLANTED(barriers_at_two_places),
                                       APEX_PLANTED(race_between_blocks_on_one_output),
                                       APEX_PLANTED(blocks_that_overlap),
                                       APEX_PLANTED(read_of_what_another_block_writes),
                                       APEX_PLANTED(flag_with_different_values),
                                       APEX_PLANTED(uninitialized_accumulator),
                                       APEX_PLANTED(uninitialized_output),
                                       APEX_PLANTED(sum_that_depends_on_the_order)};

}  // namespace apex
