// The host's half of an op, without torch: test_rtc.py calls it.
#include <string>

#include "drawn.h"

namespace {

struct Hidden {};

template <class T>
__global__ void draw_hidden(float*) {
  apex::wait_for_kernels_before();
}

}  // namespace

extern "C" {

// Launches on a device; returns what is raised, or what the launch gave.
__attribute__((visibility("default"))) const char* apex_draw(int device, unsigned threads, float* y,
                                                             int count, float slope, double offset,
                                                             size_t shared_bytes, int in_clusters) {
  using namespace apex;
  static thread_local std::string said;
  rtc_device = device;
  try {
    auto stream = reinterpret_cast<gpu_stream>(7);
    auto start = in_clusters && rtc_takes_clusters() ? &launch<draw<float>, 4, float*, int, Line>
                                                     : &launch<draw<float>, 1, float*, int, Line>;
    start(dim3(4), dim3(threads), shared_bytes, stream, y, count, Line{slope, offset});
    gpu_error error = gpu_last_error();
    said = error == kGpuSuccess ? "" : gpu_error_string(error);
  } catch (const std::exception& error) {
    said = error.what();
  }
  return said.c_str();
}

__attribute__((visibility("default"))) int apex_takes_long_parameters(int device) {
  apex::rtc_device = device;
  return apex::rtc_takes_long_parameters();
}

// Of kernels that cannot be named elsewhere.
__attribute__((visibility("default"))) void apex_never_called() {
  apex::launch<draw_hidden<Hidden>>(apex::rtc_device, 1, 0, nullptr, nullptr);
}
}
