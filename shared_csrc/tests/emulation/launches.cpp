// Planted bugs of launches: what GPUs refuse.
#include "planted.h"

namespace apex {
namespace {

__global__ void fill(float* y, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += blockDim.x * gridDim.x) {
    y[i] = 1.0f;
  }
}

void fill_by(dim3 grid, dim3 block, size_t shared_bytes = 0) {
  Fresh<float> y("y", 100);
  launch<fill>(grid, block, shared_bytes, nullptr, y.data(), 100);
}

template <bool kBroken>
void too_many_threads() {
  fill_by(dim3(1), dim3(kBroken ? 2048 : 1024));
}
template <bool kBroken>
void block_too_large_in_all() {
  fill_by(dim3(1), dim3(64, kBroken ? 32 : 1));
}
template <bool kBroken>
void empty_grid() {
  fill_by(dim3(kBroken ? 0 : 1), dim3(64));
}
template <bool kBroken>
void grid_too_high() {
  fill_by(dim3(1, kBroken ? 65536 : 1), dim3(64));
}
template <bool kBroken>
void too_much_dynamic_shared_memory() {
  fill_by(dim3(1), dim3(64), kBroken ? 49153 : 49152);
}

template <bool kBroken>
__global__ void large_tile(float* y) {
  APEX_SHARED(float, tile, [kBroken ? 12289 : 12288]);
  tile[threadIdx.x] = 1.0f;
  y[threadIdx.x] = tile[threadIdx.x];
}
template <bool kBroken>
void too_much_static_shared_memory() {
  Fresh<float> y("y", 64);
  run(large_tile<kBroken>, dim3(1), dim3(64), y.data());
}

template <int kBytes>
struct Table {
  char bytes[kBytes];
};
template <int kBytes>
__global__ void with_table(float* y, Table<kBytes> table) {
  y[threadIdx.x] = table.bytes[threadIdx.x];
}
template <bool kBroken>
void too_many_parameters() {
  Fresh<float> y("y", 64);
  if (emulation::most_parameter_bytes() == 4096) {
    run(with_table < kBroken ? 4089 : 4088 >, dim3(1), dim3(64), y.data(),
        Table<kBroken ? 4089 : 4088>{});
  } else {
    run(with_table < kBroken ? 32757 : 32756 >, dim3(1), dim3(64), y.data(),
        Table<kBroken ? 32757 : 32756>{});
  }
}

}  // namespace

#define APEX_PLANTED(name) {#name, name<true>, name<false>}
const std::vector<Case> kLaunchCases = {APEX_PLANTED(too_many_threads),
                                        APEX_PLANTED(block_too_large_in_all),
                                        APEX_PLANTED(empty_grid),
                                        APEX_PLANTED(grid_too_high),
                                        APEX_PLANTED(too_much_dynamic_shared_memory),
                                        APEX_PLANTED(too_much_static_shared_memory),
                                        APEX_PLANTED(too_many_parameters)};

}  // namespace apex
