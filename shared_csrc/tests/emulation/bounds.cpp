// Planted bugs of bounds and of values: tails, overflows, pointers, alignment.
#include "planted.h"

namespace apex {
namespace {

// y = 2 x, an element a thread.
template <bool kBroken>
__global__ void scale_kernel(float* y, const float* x, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (kBroken ? i <= count : i < count) y[i] = 2 * x[i];
}

template <bool kBroken>
void off_by_one_at_the_tail() {
  Values<float> x("x", 100);
  Fresh<float> y("y", 100);
  run(scale_kernel<kBroken>, dim3(2), dim3(64), y.data(), static_cast<const float*>(x.data()), 100);
}

template <bool kBroken>
__global__ void copy_packs(float* y, const float* x, int count) {
  int packs = kBroken ? count / 4 : (count + 3) / 4;  // drops what does not fill a pack
  for (int pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    float values[4];
    int left = count - 4 * pack;
    if (left >= 4) {
      load_pack(x + 4 * pack, values);
      store_pack(y + 4 * pack, values);
    } else {
      load_some(x + 4 * pack, values, left);
      store_some(y + 4 * pack, values, left);
    }
  }
}

template <bool kBroken>
void missing_tail_in_a_vectorized_loop() {
  Values<float> x("x", 103);
  Fresh<float> y("y", 103);
  run(copy_packs<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()), 103);
  emulation::check_written(y.data());
}

template <bool kBroken>
void misaligned_vector_load() {
  Values<float> x("x", 101);
  Fresh<float> y("y", 100);
  run(copy_packs<false>, dim3(1), dim3(32), y.data(),
      static_cast<const float*>(x.data() + (kBroken ? 1 : 4)), kBroken ? 100 : 96);
}

template <bool kBroken>
__global__ void shared_tile(float* y, const float* x) {
  APEX_SHARED(float, tile, [64]);
  float* all = tile;
  all[threadIdx.x + (kBroken ? 1 : 0)] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = all[63 - threadIdx.x + (kBroken ? 1 : 0)];
}

template <bool kBroken>
void shared_memory_overflow() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  run(shared_tile<kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()));
}

template <bool kBroken>
__global__ void dynamic_tile(float* y, int count) {
  APEX_DYNAMIC_SHARED(memory);
  float* tile = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < count; i += blockDim.x) tile[i] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) y[0] = tile[count - 1];
}

template <bool kBroken>
void dynamic_shared_memory_overflow() {
  Fresh<float> y("y", 1);
  launch<dynamic_tile<kBroken>>(dim3(1), dim3(32), kBroken ? 396 : 400, nullptr, y.data(), 100);
}

template <bool kBroken>
__global__ void row_starts(float* y, const float* x, int rows, int stride) {
  using index = std::conditional_t<kBroken, int, int64_t>;
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  index offset = static_cast<index>(row) * stride;
  y[row] = x[offset % 1000];
}

template <bool kBroken>
void int32_index_overflow() {
  Values<float> x("x", 1000);
  Fresh<float> y("y", 40);
  run(row_starts<kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()), 40,
      100'000'000);
}

template <bool kBroken>
void use_after_free() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  const float* data = x.data();
  // Far from all that is there, so that what is told is told by what was released.
  static float other[1 << 16];
  if (kBroken) {
    emulation::add_operand(other, sizeof(other), sizeof(float), "temporary",
                           emulation::Content::kValues);
    emulation::release_operand(other);
    data = other + 30000;
  }
  run(scale_kernel<false>, dim3(1), dim3(64), y.data(), data, 64);
}

template <bool kBroken>
void host_pointer() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  float* host = static_cast<float*>(std::calloc(1 << 20, 1));
  const float* data = kBroken ? host + 100000 : x.data();
  run(scale_kernel<false>, dim3(1), dim3(64), y.data(), data, 64);
  std::free(host);
}

template <bool kBroken>
__global__ void local_array(float* y, int count) {
  float powers[8];
  for (int i = 0; i < 8; ++i) powers[i] = 1.0f / (1 + i);
  y[threadIdx.x] = powers[(threadIdx.x + count) % (kBroken ? 9 : 8)];
}

template <bool kBroken>
void local_array_overflow() {
  Fresh<float> y("y", 32);
  run(local_array<kBroken>, dim3(1), dim3(32), y.data(), 3);
}

template <bool kBroken>
void memcpy_too_long() {
  struct Copy {
    static void kernel(float* y, const float* x, int bytes) {
      if (threadIdx.x == 0) memcpy(y, x, bytes);
    }
  };
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  run(Copy::kernel, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()),
      kBroken ? 257 : 256);
}

}  // namespace

#define APEX_PLANTED(name) {#name, name<true>, name<false>}
const std::vector<Case> kBoundsCases = {APEX_PLANTED(off_by_one_at_the_tail),
                                        APEX_PLANTED(missing_tail_in_a_vectorized_loop),
                                        APEX_PLANTED(misaligned_vector_load),
                                        APEX_PLANTED(shared_memory_overflow),
                                        APEX_PLANTED(dynamic_shared_memory_overflow),
                                        APEX_PLANTED(int32_index_overflow),
                                        APEX_PLANTED(use_after_free),
                                        APEX_PLANTED(host_pointer),
                                        APEX_PLANTED(local_array_overflow),
                                        APEX_PLANTED(memcpy_too_long)};

}  // namespace apex
