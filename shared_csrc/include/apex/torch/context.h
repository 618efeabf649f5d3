// Where an op runs: threads on the CPU; device, stream and workspace on a GPU.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "apex/core/config.h"
#include "apex/torch/like.h"

#if (defined(APEX_CUDA) || defined(APEX_HIP)) && !defined(APEX_RTC_HOST)
// Declared by shim.h only under USE_CUDA, which would pull in CUDA headers that HIP lacks.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_CPU)

class Context {
 public:
  explicit Context(const Tensor&) {}

  int threads() const { return static_cast<int>(torch::stable::get_num_threads()); }

  template <class F>
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) const {
    if (begin >= end) return;
    if (end - begin <= grain) return f(begin, end);  // no region for what one thread does
    torch::stable::parallel_for(begin, end, grain, f);
  }

  // Scratch memory, which begins with a cache line and holds anything; freed with the context.
  void* workspace(size_t bytes) const {
    try {
      workspaces_.emplace_back(::operator new(bytes, kLine));
    } catch (const std::bad_alloc&) {
      fail_to_allocate(static_cast<int64_t>(bytes), true);
    }
    return workspaces_.back().get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kLine); }
  };
  mutable std::vector<std::unique_ptr<void, Free>> workspaces_;
};

#elif defined(APEX_CUDA) || defined(APEX_HIP)

class Context {
 public:
  // `like` decides the device; work goes to that device's current stream.
  explicit Context(const Tensor& like) : guard_(like.get_device_index()), like_(like) {
    void* stream = nullptr;
#if defined(APEX_RTC_HOST)
    rtc_device = like.get_device_index();
    const auto current_stream = rtc_connection().current_stream;
    check(current_stream != nullptr, "this torch is for CPUs, and the tensor on a GPU.");
#else
    const auto current_stream = aoti_torch_get_current_cuda_stream;
#endif
    TORCH_ERROR_CODE_CHECK(current_stream(like.get_device_index(), &stream));
    stream_ = static_cast<gpu_stream>(stream);
  }

  gpu_stream stream() const { return stream_; }

#if defined(APEX_RTC_HOST)
  // Elsewhere kernels with long parameters are not even compiled: a wheel would have all twice.
  bool takes_long_parameters() const { return rtc_takes_long_parameters(); }
#endif

  // Scratch memory on the device, from torch's caching allocator; freed with the context, which is
  // safe because the allocator reuses memory in stream order.
  void* workspace(size_t bytes) const {
    workspaces_.push_back(empty(like_, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
    return memory_of(workspaces_.back(), "workspace");
  }

  void check_launch(const char* kernel) const {
    gpu_error error = gpu_last_error();
    check(error == kGpuSuccess, kernel, ": launch failed: ", gpu_error_string(error), ".");
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  Tensor like_;
  gpu_stream stream_ = nullptr;
  mutable std::vector<Tensor> workspaces_;
};

#endif

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#if defined(APEX_CONTEXT_HEADER)
#include APEX_CONTEXT_HEADER
#endif
