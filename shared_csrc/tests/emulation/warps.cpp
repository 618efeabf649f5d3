// Planted bugs of warps: masks, widths, lanes that do not take part.
#include "planted.h"

namespace apex {
namespace {

bool is_wide() { return std::string(std::getenv("APEX_EMULATE")) == "64"; }

template <class F>
__device__ float sum_by(float value, int half, const F& shuffle) {
  for (; half > 0; half /= 2) value += shuffle(value, half);
  return value;
}

// The mask names 32 lanes, of which half call.
template <bool kBroken>
__global__ void half_of_mask(float* y, const float* x) {
  float value = x[threadIdx.x];
  if (threadIdx.x < 16) {
    uint64_t mask = kBroken ? 0xffffffffu : 0xffffu;
    y[threadIdx.x] =
        sum_by(value, 8, [=](float v, int half) { return __shfl_xor_sync(mask, v, half, 16); });
  }
}

template <bool kBroken>
void wrong_warp_mask() {
  Values<float> x("x", 32);
  Fresh<float> y("y", 16);
  run(half_of_mask<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()));
  expect(y[0] == 43.0f, "the sum of 16 values");
}

// A mask of 32 lanes, called by what may be 64.
__global__ void narrow_mask(float* y, const float* x) {
  y[threadIdx.x] = sum_by(x[threadIdx.x], 16, [](float v, int half) {
    return __shfl_xor_sync(0xffffffffu, v, half, 32);
  });
}
__global__ void by_group(float* y, const float* x) {
  y[threadIdx.x] = reduce_group(x[threadIdx.x], Add{});
}

template <bool kBroken>
void mask_of_32_lanes_on_64() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  run(kBroken ? narrow_mask : by_group, dim3(1), dim3(64), y.data(),
      static_cast<const float*>(x.data()));
}

// The whole wavefront, by code that knows 32 lanes.
template <bool kBroken>
__global__ void wave_sum(float* y, const float* x, int lanes) {
  float sum = sum_by(x[threadIdx.x], kBroken ? 16 : lanes / 2,
                     [](float v, int half) { return __shfl_xor(v, half); });
  if (threadIdx.x == 0) *y = sum;
}

template <bool kBroken>
void wrong_reduction_width() {
  int lanes = is_wide() ? 64 : 32;
  Values<float> x("x", 64);
  Fresh<float> y("y", 1);
  run(wave_sum<kBroken>, dim3(1), dim3(lanes), y.data(), static_cast<const float*>(x.data()),
      lanes);
  float sum = 0;
  for (int i = 0; i < lanes; ++i) sum += x[i];
  expect(y[0] == sum, "the sum over the warp");
}

template <bool kBroken>
__global__ void wide_shuffle(float* y, const float* x) {
  float value = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor(value, 1, kBroken ? 128 : 32);
}

template <bool kBroken>
void shuffle_wider_than_the_warp() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  run(wide_shuffle<kBroken>, dim3(1), dim3(64), y.data(), static_cast<const float*>(x.data()));
}

// Lanes that have left the loop give no value.
template <bool kBroken>
__global__ void shuffle_in_loop(float* y, const float* x, int count) {
  float sum = 0;
  int end = kBroken ? count : (count + 31) / 32 * 32;
  for (int i = threadIdx.x; i < end; i += 32) {
    float value = i < count ? x[i] : 0.0f;
    sum += __shfl(value, 31, 32);
  }
  y[threadIdx.x] = sum;
}

template <bool kBroken>
void shuffle_from_an_inactive_lane() {
  Values<float> x("x", 50);
  Fresh<float> y("y", 32);
  run(shuffle_in_loop<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()),
      50);
}

template <bool kBroken>
__global__ void votes(uint64_t* y, const float* x) {
  if (!kBroken || threadIdx.x % 2 == 0)
    y[threadIdx.x] = __ballot_sync(0xffffffffu, x[threadIdx.x] > 2);
}

template <bool kBroken>
void vote_without_all_lanes() {
  Values<float> x("x", 32);
  Fresh<uint64_t> y("y", 32);
  run(votes<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()));
  uint64_t expected = 0;
  for (int i = 0; i < 32; ++i) expected |= uint64_t{x[i] > 2} << i;
  expect(y[0] == expected && y[31] == expected, "the votes");
}

// A shuffle and a barrier that wait for each other.
template <bool kBroken>
__global__ void shuffle_or_barrier(float* y, const float* x) {
  float value = x[threadIdx.x];
  if (kBroken && threadIdx.x % 32 == 5) {
    __syncthreads();
    value = shuffle_xor(value, 1, group_mask());
  } else {
    value = shuffle_xor(value, 1, group_mask());
    __syncthreads();
  }
  y[threadIdx.x] = value;
}

template <bool kBroken>
void shuffle_and_barrier_in_two_orders() {
  Values<float> x("x", 64);
  Fresh<float> y("y", 64);
  run(shuffle_or_barrier<kBroken>, dim3(1), dim3(64), y.data(),
      static_cast<const float*>(x.data()));
}

}  // namespace

#define APEX_PLANTED(name) {#name, name<true>, name<false>}
const std::vector<Case> kWarpCases = {APEX_PLANTED(wrong_warp_mask),
                                      APEX_PLANTED(mask_of_32_lanes_on_64),
                                      APEX_PLANTED(wrong_reduction_width),
                                      APEX_PLANTED(shuffle_wider_than_the_warp),
                                      APEX_PLANTED(shuffle_from_an_inactive_lane),
                                      APEX_PLANTED(vote_without_all_lanes),
                                      APEX_PLANTED(shuffle_and_barrier_in_two_orders)};

}  // namespace apex
