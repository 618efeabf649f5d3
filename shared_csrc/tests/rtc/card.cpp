// In the place of libtorch_cuda, and of some functions of libtorch_cpu: kernels that an op
// registers for NVIDIA GPUs serve tensors of the CPU, which lie on the fake device that tests name.
// With the emulated GPU, on which the fake driver launches.
#include <dlfcn.h>

#include <cstring>

// The emulator's checks ask for operands, which nobody tells it here: `nox -s emulate` makes them.
#define begin_atomic begin_checked_atomic
#include "emulation/runtime.cpp"
#undef begin_atomic

namespace apex::emulation {
void begin_atomic(const void*, size_t, Site) {}
}  // namespace apex::emulation

#define FAKE extern "C" __attribute__((visibility("default")))

extern "C" int cuCtxGetCurrent(void**);
extern "C" int cuCtxSetCurrent(void*);
extern "C" int cuDevicePrimaryCtxRetain(void**, int);
extern "C" void* fake_stream(int device);

namespace {

int device_of_tensors = 0;

template <class Function>
Function* own(Function*, const char* name) {
  static void* torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(torch, name));
}

}  // namespace

FAKE void fake_device(int device) { device_of_tensors = device; }

FAKE int aoti_torch_library_init_impl(const char* ns, const char* key, const char* file,
                                      uint32_t line, void** library) {
  static auto* real = own(&aoti_torch_library_init_impl, "aoti_torch_library_init_impl");
  return real(ns, std::strcmp(key, "CUDA") == 0 ? "CPU" : key, file, line, library);
}
FAKE int aoti_torch_get_device_index(void*, int32_t* index) {
  *index = device_of_tensors;
  return 0;
}
FAKE int aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                  int32_t dtype, int32_t device, int32_t, void** result) {
  static auto* real = own(&aoti_torch_empty_strided, "aoti_torch_empty_strided");
  return real(dim, sizes, strides, dtype, device, -1, result);
}
FAKE int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = fake_stream(device);
  return 0;
}
// As torch's guard: the thread has the device's context, and later the one that it had. A guard is
// not null, and contexts are small numbers.
FAKE int aoti_torch_create_device_guard(int32_t device, char** guard) {
  void *before = nullptr, *context = nullptr;
  const int error = cuCtxGetCurrent(&before);
  *guard = static_cast<char*>(before) + 1;
  return error + cuDevicePrimaryCtxRetain(&context, device) + cuCtxSetCurrent(context);
}
FAKE int aoti_torch_delete_device_guard(char* guard) { return cuCtxSetCurrent(guard - 1); }
