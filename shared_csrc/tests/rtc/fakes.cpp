// In the place of libcuda and of libnvrtc, as much as native/rtc.py and native/nvrtc.py use: no GPU
// is there. A launch of `draw` does on the host what that kernel does.
#include <cstdio>
#include <cstring>
#include <string>

#define FAKE extern "C" __attribute__((visibility("default")))

struct Line {
  float slope;
  double offset;
};

struct Kernel {
  std::string library, symbol;
};

namespace {

int version = 13000, mode = 0, dependent = 0, loads = 0, loads_outside_of_graphs = 0,
    compilations = 0;
std::string last_symbol, last_image;
constexpr int kRelaxed = 2, kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201;
thread_local int context = 0;  // of a device, from 1 on

}  // namespace

// What the fakes saw, for the tests.
FAKE int fake_loads() { return loads; }
FAKE int fake_loads_outside_of_graphs() { return loads_outside_of_graphs; }
FAKE int fake_compilations() { return compilations; }
FAKE int fake_context() { return context; }
FAKE int fake_mode() { return mode; }
FAKE int fake_dependent_launches() { return dependent; }
FAKE const char* fake_symbol() { return last_symbol.c_str(); }
FAKE const char* fake_image() { return last_image.c_str(); }

FAKE void fake_version(int newest) { version = newest; }

FAKE int cuDriverGetVersion(int* newest) {
  *newest = version;
  return 0;
}
FAKE int cuCtxGetCurrent(void** current) {
  *current = reinterpret_cast<void*>(static_cast<long>(context));
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** of_device, int device) {
  *of_device = reinterpret_cast<void*>(device + 1L);
  return 0;
}
FAKE int cuCtxSetCurrent(void* current) {
  context = static_cast<int>(reinterpret_cast<long>(current));
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* other) {
  std::swap(mode, *other);
  return 0;
}
FAKE int cuLibraryLoadData(void** library, const char* image, void*, void*, unsigned, void*, void*,
                           unsigned) {
  if (context == 0) return kInvalidContext;
  if (std::strncmp(image, "machine code", 12) != 0) return kInvalidImage;
  loads += 1;
  loads_outside_of_graphs += mode == kRelaxed;
  last_image = image;
  *library = new std::string(image);
  return 0;
}
FAKE int cuLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  last_symbol = symbol;
  *kernel = new Kernel{*static_cast<std::string*>(library), symbol};
  return 0;
}
FAKE int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalidValue ? "invalid argument" : "device kernel image is invalid";
  return 0;
}
FAKE int cuLaunchKernel(void* kernel, unsigned grid_x, unsigned, unsigned, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                        void** parameters, void** extra) {
  if (context == 0) return kInvalidContext;
  bool is_plain = grid_x == 1 && block_y == 1 && block_z == 1 && shared_bytes == 0 && !extra;
  if (!is_plain || block_x > 1024 || stream != reinterpret_cast<void*>(7)) return kInvalidValue;
  if (static_cast<Kernel*>(kernel)->symbol.find("draw") == std::string::npos) return kInvalidImage;
  float* y = *static_cast<float**>(parameters[0]);
  int count = *static_cast<int*>(parameters[1]);
  Line line = *static_cast<Line*>(parameters[2]);
  for (int i = 0; i < count && i < static_cast<int>(block_x); ++i) {
    y[i] = static_cast<float>(line.slope * i + line.offset);
  }
  return 0;
}

// CUlaunchConfig, with one attribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
struct Attribute {
  int id, hole, value[16];
};
struct Configuration {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
FAKE int cuLaunchKernelEx(const Configuration* as, void* kernel, void** parameters, void** extra) {
  if (as->count != 1 || as->attributes->id != 6 || as->attributes->value[0] != 1) {
    return kInvalidValue;
  }
  const int error =
      cuLaunchKernel(kernel, as->grid[0], as->grid[1], as->grid[2], as->block[0], as->block[1],
                     as->block[2], as->shared_bytes, as->stream, parameters, extra);
  dependent += error == 0;
  return error;
}

struct Program {
  std::string source, name, code, log;
};

FAKE int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 7;
  return 0;
}
FAKE int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
FAKE int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 75, architectures[1] = 90, architectures[2] = 120;
  return 0;
}
FAKE const char* nvrtcGetErrorString(int error) {
  return error == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}
FAKE int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**,
                            const char**) {
  *program = new Program{source, "", "", ""};
  return 0;
}
FAKE int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
FAKE int nvrtcAddNameExpression(Program* program, const char* name) {
  program->name = name;
  return 0;
}
FAKE int nvrtcCompileProgram(Program* program, int count, const char** options) {
  if (program->source.find("/drawn.h\"") == std::string::npos) {
    program->log = "error: no template draw";
    return 6;
  }
  compilations += 1;
  program->code = std::string("machine code") + '\0' + program->name;
  for (int i = 0; i < count; ++i) program->code += std::string(" ") + options[i];
  return 0;
}
FAKE int nvrtcGetLoweredName(Program* program, const char* name, const char** symbol) {
  static thread_local std::string lowered;
  lowered = program->name == name ? "_Z4drawIfEvPT_i4Line" : "";
  *symbol = lowered.c_str();
  return lowered.empty();
}
FAKE int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
FAKE int nvrtcGetProgramLog(Program* program, char* log) {
  std::strcpy(log, program->log.c_str());
  return 0;
}
FAKE int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = program->code.size();
  return 0;
}
FAKE int nvrtcGetCUBIN(Program* program, char* code) {
  std::memcpy(code, program->code.data(), program->code.size());
  return 0;
}
FAKE int nvrtcGetPTXSize(Program* program, size_t* size) {
  *size = program->code.size() + 4;
  return 0;
}
FAKE int nvrtcGetPTX(Program* program, char* code) {
  std::string text = program->code + " ptx";
  std::memcpy(code, text.data(), text.size());
  return 0;
}
