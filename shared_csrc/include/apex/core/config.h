// Compiler, backend and ISA level of this translation unit, and the qualifiers that depend on them.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) || defined(APEX_RTC_HOST)
#define APEX_CUDA 1
#define APEX_GPU 1
#elif defined(__HIPCC__)
#if !defined(__HIPCC_RTC__)  // HIPRTC has it built in
#include <hip/hip_runtime.h>
#endif
#define APEX_HIP 1
#define APEX_GPU 1
#elif !defined(APEX_GPU)  // a tool may bring a GPU of its own, in a header that comes first
#define APEX_CPU 1
#endif

// Kernels alone are compiled, at run time.
#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define APEX_RTC 1
#endif

#if defined(APEX_GPU)
#define APEX_HD __host__ __device__ __forceinline__
#define APEX_DEVICE __device__ __forceinline__
// Threads of a block at most, and blocks that registers must suffice for; 0 is nothing said. HIP's
// second number would be one of warps.
#if defined(APEX_CUDA)
#define APEX_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#else
#define APEX_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__((threads) ? (threads) : 1024)
#endif
#else
#define APEX_HD inline __attribute__((always_inline))
#endif

// The same template compiled for two backends or ISA levels has one mangled name and two bodies.
// Everything that depends on either lives in this inline namespace.
#if !defined(APEX_ISA)
#define APEX_ISA baseline
#endif
#define APEX_CONCAT_(a, b) a##b
#define APEX_CONCAT(a, b) APEX_CONCAT_(a, b)
#if defined(APEX_RTC) || defined(APEX_RTC_HOST)
#define APEX_BACKEND_NS gpu  // one host's half names the kernels of CUDA and HIP
#elif defined(APEX_CUDA)
#define APEX_BACKEND_NS cuda
#elif defined(APEX_HIP)
#define APEX_BACKEND_NS hip
#elif defined(APEX_CPU)
#define APEX_BACKEND_NS APEX_CONCAT(cpu_, APEX_ISA)
#endif

// The loops of the engines are free of aliasing between operands of different tensors. GCC unrolls
// loops over few lanes before it vectorizes, unless told not to, and what is left of them is
// scalar.
#if defined(__clang__)
#define APEX_VECTORIZE _Pragma("clang loop vectorize(enable)")
#define APEX_VECTORIZE_FEW APEX_VECTORIZE
#elif defined(__GNUC__)
#define APEX_VECTORIZE _Pragma("GCC ivdep")
#define APEX_VECTORIZE_FEW _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#else
#define APEX_VECTORIZE
#define APEX_VECTORIZE_FEW
#endif

#if defined(APEX_RTC)
namespace apex {
using gpu_stream = void*;  // parts of the host's half that are read and not compiled name it
}
#elif defined(APEX_RTC_HOST)
namespace apex {
using gpu_stream = cudaStream_t;
using gpu_error = int;
inline gpu_error gpu_last_error() { return std::exchange(rtc_error, 0); }
inline const char* gpu_error_string(gpu_error error) {
  const char* text = nullptr;
  rtc_connection().describe(error, &text);
  return text ? text : "unknown error";
}
inline constexpr gpu_error kGpuSuccess = 0;
}  // namespace apex
#elif defined(APEX_CUDA)
namespace apex {
using gpu_stream = cudaStream_t;
using gpu_error = cudaError_t;
inline gpu_error gpu_last_error() { return cudaGetLastError(); }
inline const char* gpu_error_string(gpu_error error) { return cudaGetErrorString(error); }
inline constexpr gpu_error kGpuSuccess = cudaSuccess;
}  // namespace apex
#elif defined(APEX_HIP)
namespace apex {
using gpu_stream = hipStream_t;
using gpu_error = hipError_t;
inline gpu_error gpu_last_error() { return hipGetLastError(); }
inline const char* gpu_error_string(gpu_error error) { return hipGetErrorString(error); }
inline constexpr gpu_error kGpuSuccess = hipSuccess;
}  // namespace apex
#endif
