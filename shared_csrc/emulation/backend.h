// The emulated GPU as a backend of the kernel headers. The compiler is told to include it first, so
// that no header below include/ names it: what CUDA and HIP have built in, kernels find here.
#pragma once

#include "launch.h"

#define APEX_EMU 1
#define APEX_GPU 1
#define APEX_BACKEND_NS emu

#define APEX_SHARED(type, name, ...) \
  static const char name##_key = 0;  \
  auto& name = ::apex::emulation::shared_variable<type __VA_ARGS__>(&name##_key, #name)
#define APEX_DYNAMIC_SHARED(name) \
  char* const name = static_cast<char*>(::apex::emulation::dynamic_shared())

// Ops register kernels for the CPU's tensors, and tell of their operands.
#define APEX_DISPATCH_KEY CPU
#define APEX_CONTEXT_HEADER "emulation/context.h"
#define APEX_BLASLT_HEADER "emulation/blaslt.h"
#define APEX_NAME_OPERAND(data, name) ::apex::emulation::name_operand(data, name)
#define APEX_RELEASE_OPERAND(data) ::apex::emulation::release_operand(data)

namespace apex {
using gpu_stream = emulation::Stream*;

inline namespace emu {

inline constexpr int kNvidiaLanes = 32;

// As CUDA has it where warps are of 32 lanes, as HIP has it where they are of 64.
template <class T>
T shuffle_lanes(unsigned lanes, T value, int mask) {
  if (emulation::warp_width() == kNvidiaLanes) {
    return __shfl_xor_sync(lanes, value, mask, kNvidiaLanes);
  }
  return __shfl_xor(value, mask, kNvidiaLanes);
}

inline void sync_lanes(unsigned lanes) {
  emulation::warp_width() == kNvidiaLanes ? __syncwarp(lanes) : __wave_barrier();
}

template <auto kernel, class... Arguments>
void launch(dim3 grid, dim3 block, size_t shared_bytes, gpu_stream stream,
            const Arguments&... arguments) {
  emulation::emulate(kernel, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace emu
}  // namespace apex
