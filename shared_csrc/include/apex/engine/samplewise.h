// samplewise: run a program on every sample of a batch, all threads of a group on one sample.
//
// A program has `template <class G> void sample(G& group) const`, in which
//
//   group.index()                 // which sample
//   group.each(begin, end, f);    // f(begin) to f(end - 1) in any order; afterwards all are done
//   group.once(f);                // by one thread; not waited for
//
// What a sample's threads do between two calls of each() must be the same for all of them. On the
// CPU a group is one thread, and samples are shared among threads.
#pragma once

#include "apex/core/config.h"
#include "apex/core/types.h"

#if defined(APEX_GPU)
#include "apex/core/gpu.h"
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

#if defined(APEX_GPU)

inline constexpr int kSampleThreads = 128;

class SampleGroup {
 public:
  APEX_DEVICE int64_t index() const { return blockIdx.x; }

  template <class F>
  APEX_DEVICE void each(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) f(i);
    __syncthreads();
  }

  template <class F>
  APEX_DEVICE void once(const F& f) const {
    if (threadIdx.x == 0) f();
  }
};

template <class Program>
__global__ void __launch_bounds__(kSampleThreads) samplewise_kernel(Program program) {
  wait_for_kernels_before();
  SampleGroup group;
  program.sample(group);
}

template <class Context, class Program>
void samplewise(const Context& context, int64_t samples, const Program& program) {
  if (samples == 0) return;
  launch<samplewise_kernel<Program>>(dim3(static_cast<unsigned>(samples)), dim3(kSampleThreads), 0,
                                     context.stream(), program);
  context.check_launch("samplewise");
}

#else

class SampleGroup {
 public:
  explicit SampleGroup(int64_t index) : index_(index) {}

  int64_t index() const { return index_; }

  template <class F>
  void each(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin; i < end; ++i) f(i);
  }

  template <class F>
  void once(const F& f) const {
    f();
  }

 private:
  int64_t index_;
};

template <class Context, class Program>
void samplewise(const Context& context, int64_t samples, const Program& program) {
  context.parallel_for(0, samples, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      SampleGroup group(index);
      program.sample(group);
    }
  });
}

#endif

}  // namespace APEX_BACKEND_NS
}  // namespace apex
