// What kernels see of the emulated GPU: indices, qualifiers, barriers, shuffles, votes, atomics.
//
// The names and meanings are CUDA's and HIP's; docs/guides/gpu-without-a-gpu.md describes the
// whole. Functions that are declared here and not defined are the emulator's, see machine.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace apex::emulation {

struct Index {
  unsigned x, y, z;
};
struct Stream;

// Where a kernel waits, for reports and to tell one barrier from another.
struct Site {
  const char* file;
  int line;
};

enum class Collective { kSync, kShuffleTo, kShuffleXor, kShuffleUp, kShuffleDown, kVote };
// In place of a mask: the lanes that run in step, as HIP's collectives without a mask have it.
inline constexpr uint64_t kInStep = 0;

// Constant for a thread, so that compilers need not ask twice.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index block_size();
__attribute__((const)) Index grid_size();
int warp_width();  // 32 or 64, from APEX_EMULATE
void block_barrier(Site site);
// The calling lane's result: the value that it reads, or the votes of all lanes that take part.
uint64_t collective(Collective kind, uint64_t mask, uint64_t value, int argument, int width,
                    Site site);
uint64_t active_lanes();
void* shared_variable(const void* key, const char* name, size_t bytes, size_t alignment);
void* dynamic_shared();
// Checks the access and returns; the caller then reads and writes without further checks.
void begin_atomic(const void* address, size_t bytes, Site site);

template <class T>
T& shared_variable(const void* key, const char* name) {
  return *static_cast<T*>(shared_variable(key, name, sizeof(T), alignof(T)));
}

template <class T>
T exchange(Collective kind, uint64_t mask, T value, int argument, int width, Site site) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = collective(kind, mask, bits, argument, width, site);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// Threads of the emulator take turns, so that plain code is atomic.
template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T atomically(T* address, Site site, F&& next) {
  begin_atomic(address, sizeof(T), site);
  T old = *address;
  *address = next(old);
  return old;
}

}  // namespace apex::emulation

#define threadIdx (::apex::emulation::thread_index())
#define blockIdx (::apex::emulation::block_index())
#define blockDim (::apex::emulation::block_size())
#define gridDim (::apex::emulation::grid_size())

// Default arguments, because those are evaluated where a function is called.
#define APEX_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(APEX_CALLER) { ::apex::emulation::block_barrier({file, line}); }
inline void __syncwarp(uint64_t mask = 0xffffffffu, APEX_CALLER) {
  ::apex::emulation::collective(::apex::emulation::Collective::kSync, mask, 0, 0, 0, {file, line});
}
// HIP's __builtin_amdgcn_wave_barrier().
inline void __wave_barrier(APEX_CALLER) {
  ::apex::emulation::collective(::apex::emulation::Collective::kSync, ::apex::emulation::kInStep, 0,
                                0, 0, {file, line});
}

#define APEX_EMULATED_SHUFFLE(suffix, kind)                                                        \
  template <class T>                                                                               \
  T __shfl##suffix##_sync(uint64_t mask, T value, int argument, int width = 0, APEX_CALLER) {      \
    return ::apex::emulation::exchange(::apex::emulation::Collective::kind, mask, value, argument, \
                                       width, {file, line});                                       \
  }                                                                                                \
  template <class T>                                                                               \
  T __shfl##suffix(T value, int argument, int width = 0, APEX_CALLER) {                            \
    return ::apex::emulation::exchange(::apex::emulation::Collective::kind,                        \
                                       ::apex::emulation::kInStep, value, argument, width,         \
                                       {file, line});                                              \
  }
APEX_EMULATED_SHUFFLE(, kShuffleTo)
APEX_EMULATED_SHUFFLE(_xor, kShuffleXor)
APEX_EMULATED_SHUFFLE(_up, kShuffleUp)
APEX_EMULATED_SHUFFLE(_down, kShuffleDown)
#undef APEX_EMULATED_SHUFFLE

inline uint64_t __ballot_sync(uint64_t mask, bool vote, APEX_CALLER) {
  return ::apex::emulation::collective(::apex::emulation::Collective::kVote, mask, vote, 0, 0,
                                       {file, line});
}
inline bool __any_sync(uint64_t mask, bool vote, APEX_CALLER) {
  return __ballot_sync(mask, vote, file, line) != 0;
}
inline bool __all_sync(uint64_t mask, bool vote, APEX_CALLER) {
  return __ballot_sync(mask, !vote, file, line) == 0;
}
inline uint64_t __activemask() { return ::apex::emulation::active_lanes(); }

template <class T>
T atomicAdd(T* address, T value, APEX_CALLER) {
  return ::apex::emulation::atomically(address, {file, line},
                                       [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* address, T value, APEX_CALLER) {
  return ::apex::emulation::atomically(address, {file, line},
                                       [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, T value, APEX_CALLER) {
  return ::apex::emulation::atomically(address, {file, line},
                                       [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicExch(T* address, T value, APEX_CALLER) {
  return ::apex::emulation::atomically(address, {file, line}, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T compare, T value, APEX_CALLER) {
  return ::apex::emulation::atomically(address, {file, line},
                                       [=](T old) { return old == compare ? value : old; });
}

namespace apex {
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
}  // namespace apex
