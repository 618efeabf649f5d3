// The host's half of GPU code by a plain C++ compiler, which is told to include this first: kernels
// are named here, and compiled by NVRTC or HIPRTC when they are first launched. native/rtc.py,
// which knows how, connects itself when it loads the library.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#define APEX_RTC_HOST 1

// What kernels are made of, so that a compiler for hosts accepts them. Nothing calls them here.
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define APEX_SHARED(type, name, ...) static type name __VA_ARGS__
#define APEX_DYNAMIC_SHARED(name) alignas(16) static char name[16]

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
inline void __syncthreads() {}
inline void __syncwarp(unsigned) {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __ballot_sync(unsigned, int) { return 0; }
template <class T>
T __shfl_xor_sync(unsigned, T value, int, int) {
  return value;
}
template <class T>
T atomicAdd(T* address, T) {
  return *address;
}
using std::max;
using std::min;

using cudaStream_t = void*;

namespace apex {

struct RtcKernel;

// CUlaunchAttribute and CUlaunchConfig of the driver.
struct RtcAttribute {
  int id;
  alignas(8) unsigned numbers[16];
};
struct RtcConfiguration {
  unsigned grid[3], block[3], shared_bytes;
  cudaStream_t stream;
  const RtcAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(RtcAttribute) == 72 && sizeof(RtcConfiguration) == 56);

// What native/rtc.py, the driver and torch do for a library.
struct RtcConnection {
  // Gives the kernel for a device, compiled and loaded; else a text of what is in the way, and 1.
  int (*find)(const RtcKernel* kernel, int device, void** found, char* problem, size_t bytes);
  int (*launch)(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, cudaStream_t stream,
                void** parameters, void** extra);
  int (*describe)(int error, const char** text);
  // Makes the device's context the thread's, as CUDA's runtime does in calls that launches lack.
  void (*enter)(int device);
  // As `launch`, by a description; with attributes.
  int (*launch_as)(const RtcConfiguration* configuration, void* kernel, void** parameters,
                   void** extra);
  // Whether a kernel may begin before the one in front of it has ended.
  int (*takes_dependent_launches)(int device);
  // Whether a kernel may have 32,764 bytes of parameters instead of 4 KiB.
  int (*takes_long_parameters)(int device);
  // Whether a kernel may be launched in clusters of blocks.
  int (*takes_clusters)(int device);
  // Sets what a kernel may take on a device.
  int (*set_attribute)(int attribute, int value, void* kernel, int device);
  // torch's own; null where that is for CPUs.
  int (*current_stream)(int device, void** stream);
  int is_hip;
};

inline std::atomic<const RtcConnection*> rtc_connected{nullptr};
// Of this thread: where an op runs, and what its last launch gave.
inline thread_local int rtc_device = 0;
inline thread_local int rtc_error = 0;

// Another thread may call an op between the loading of its library and the connection.
inline const RtcConnection& rtc_connection() {
  for (int wait = 0; wait < 10000; ++wait) {
    if (const RtcConnection* connection = rtc_connected.load(std::memory_order_acquire)) {
      return *connection;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error("this library was not loaded by Apex, so nothing compiles its kernels.");
}

// A kernel that the library may launch: its name as the compiler mangles it, which has all of its
// template arguments; what includes it; and the bytes of its parameters, as a GPU counts them.
struct RtcKernel {
  const char* name;
  const char* unit;
  size_t parameter_bytes;
};

inline std::vector<RtcKernel>& rtc_kernels() {
  static std::vector<RtcKernel> kernels;
  return kernels;
}

template <auto kernel>
struct KernelOf;

inline namespace gpu {

inline constexpr int kRtcDevices = 64;
inline constexpr int kRtcInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT
// CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
inline constexpr int kRtcCluster = 4, kRtcDependent = 6;
inline constexpr int kRtcSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr size_t kRtcGrantedBytes = 48 * 1024;  // of it, without being asked for

inline void* rtc_find(const RtcKernel& kernel) {
  char problem[4096] = "";
  void* found = nullptr;
  if (rtc_connection().find(&kernel, rtc_device, &found, problem, sizeof(problem))) {
    throw std::runtime_error(problem);
  }
  return found;
}

// Of the device where an op runs; asked once.
template <int (*RtcConnection::*question)(int)>
bool rtc_device_has() {
  static std::atomic<int> known[kRtcDevices];  // 1 is no, 2 is yes
  if (rtc_device >= kRtcDevices) return false;
  int answer = known[rtc_device].load(std::memory_order_relaxed);
  if (answer == 0) {
    answer = (rtc_connection().*question)(rtc_device) ? 2 : 1;
    known[rtc_device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}
inline bool rtc_takes_long_parameters() {
  return rtc_device_has<&RtcConnection::takes_long_parameters>();
}
inline bool rtc_takes_clusters() { return rtc_device_has<&RtcConnection::takes_clusters>(); }

template <auto kernel>
struct RtcLaunch;

template <class... Parameters, void (*kernel)(Parameters...)>
struct RtcLaunch<kernel> {
  static constexpr size_t parameter_bytes() {
    size_t bytes = 0;
    ((bytes = (bytes + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) +
              sizeof(Parameters)),
     ...);
    return bytes;
  }

  // `dependent`: it need not wait for the kernel before it, where the device knows that. `cluster`:
  // of as many blocks along x, where `rtc_takes_clusters()`. Of shared memory, a launch may ask for
  // as much as the card grants.
  static void run(bool dependent, unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes,
                  cudaStream_t stream, Parameters... parameters) {
    static std::atomic<void*> kept[kRtcDevices];
    bool keeps = rtc_device < kRtcDevices;
    void* found = keeps ? kept[rtc_device].load(std::memory_order_acquire) : nullptr;
    if (found == nullptr) {
      found = rtc_find(listed);
      if (keeps) kept[rtc_device].store(found, std::memory_order_release);
    }
    void* addresses[] = {&parameters..., nullptr};
    const auto bytes = static_cast<unsigned>(shared_bytes);
    RtcAttribute attributes[2];
    unsigned count = 0;
    if (cluster > 1) attributes[count++] = {kRtcCluster, {cluster, 1, 1}};
    if (dependent && rtc_device_has<&RtcConnection::takes_dependent_launches>()) {
      attributes[count++] = {kRtcDependent, {1}};
    }
    auto start = [&] {
      const RtcConnection& connection = rtc_connection();
      if (shared_bytes > kRtcGrantedBytes) {
        const int number = static_cast<int>(bytes);
        const int error = connection.set_attribute(kRtcSharedBytes, number, found, rtc_device);
        if (error != 0) return error;
      }
      if (count == 0) {
        return connection.launch(found, grid.x, grid.y, grid.z, block.x, block.y, block.z, bytes,
                                 stream, addresses, nullptr);
      }
      const RtcConfiguration configuration{
          {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, bytes, stream, attributes, count};
      return connection.launch_as(&configuration, found, addresses, nullptr);
    };
    rtc_error = start();
    if (rtc_error == kRtcInvalidContext) {
      rtc_connection().enter(rtc_device);
      rtc_error = start();
    }
  }

  // APEX_RTC_UNIT is an op's name, and its source's where it has several.
  static const RtcKernel& list() {
    static const RtcKernel own{typeid(KernelOf<kernel>*).name(), APEX_RTC_UNIT, parameter_bytes()};
    rtc_kernels().push_back(own);
    return own;
  }
  static inline const RtcKernel& listed = list();
};

}  // namespace gpu
}  // namespace apex

#define APEX_RTC_EXPORT extern "C" inline __attribute__((used, visibility("default")))

APEX_RTC_EXPORT void apex_rtc_connect(const apex::RtcConnection* connection) {
  apex::rtc_connected.store(connection, std::memory_order_release);
}
// The library's kernels, and how many.
APEX_RTC_EXPORT size_t apex_rtc_kernels(const apex::RtcKernel** kernels) {
  *kernels = apex::rtc_kernels().data();
  return apex::rtc_kernels().size();
}
