// Kernels that compute the right numbers and cost more than their twins do.
#include "planted.h"

namespace apex {
namespace {

constexpr int kCount = 512;

// y = 2 x, an element a thread; the costly one reads x once more, for a sum that it does not need.
template <bool kTwice>
__global__ void doubled(float* y, const float* x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  if (kTwice) {
    for (int j = i % 2; j < 2; ++j) sum += x[2 * (i / 2) + j];
  }
  y[i] = 2 * x[i] + 0 * sum;
}

void double_into(Fresh<float>& y, Values<float>& x, bool twice, int launches = 1) {
  for (int i = 0; i < launches; ++i) {
    run(twice ? doubled<true> : doubled<false>, dim3(kCount / 64), dim3(64), y.data(),
        static_cast<const float*>(x.data()));
  }
}

template <bool kBroken>
void one_launch_more() {
  Values<float> x("x", kCount);
  Fresh<float> y("y", kCount);
  double_into(y, x, false, kBroken ? 2 : 1);
}
template <bool kBroken>
void re_read() {
  Values<float> x("x", kCount);
  Fresh<float> y("y", kCount);
  double_into(y, x, kBroken);
}

template <int N>
struct alignas(2 * N) Halves {
  uint16_t values[N];
};
template <int N>
__global__ void copy_halves(Halves<N>* y, const Halves<N>* x) {
  for (unsigned i = threadIdx.x; i < kCount / N; i += blockDim.x) y[i] = x[i];
}
template <bool kBroken>
void two_byte_lane() {
  Values<uint16_t> x("x", kCount);
  Fresh<uint16_t> y("y", kCount);
  constexpr int N = kBroken ? 1 : 8;
  run(copy_halves<N>, dim3(1), dim3(64), reinterpret_cast<Halves<N>*>(y.data()),
      reinterpret_cast<const Halves<N>*>(x.data()));
}

// Lanes take elements that are neighbours, or a row each.
template <bool kByRows>
__global__ void copy_square(float* y, const float* x) {
  for (int step = 0; step < 16; ++step) {
    int i = kByRows ? 16 * threadIdx.x + step : 32 * step + threadIdx.x;
    y[i] = x[i];
  }
}
template <bool kBroken>
void scattered_lanes() {
  Values<float> x("x", kCount);
  Fresh<float> y("y", kCount);
  run(copy_square<kBroken>, dim3(1), dim3(32), y.data(), static_cast<const float*>(x.data()));
}

__global__ void copy_some(float* y, const float* x, int count) {
  if (static_cast<int>(threadIdx.x) < count) y[threadIdx.x] = x[threadIdx.x];
}
template <bool kBroken>
void idle_threads() {
  Values<float> x("x", 32);
  Fresh<float> y("y", 32);
  run(copy_some, dim3(1), dim3(kBroken ? 256 : 32), y.data(), static_cast<const float*>(x.data()),
      32);
}

}  // namespace

#define APEX_PLANTED(name) {#name, name<true>, name<false>}
const std::vector<Case> kCostCases = {APEX_PLANTED(one_launch_more), APEX_PLANTED(re_read),
                                      APEX_PLANTED(two_byte_lane), APEX_PLANTED(scattered_lanes),
                                      APEX_PLANTED(idle_threads)};

}  // namespace apex
