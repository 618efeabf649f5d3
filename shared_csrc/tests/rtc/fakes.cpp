// In the place of libcuda and libnvrtc, or of libamdhip64 and libhiprtc, as much as native/rtc.py
// and native/drivers.py use: no GPU is there. A launch of `draw` does on the host what that kernel
// does; with `fake_compiler` kernels are compiled for the emulated GPU, and run on it.
#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "kernel.h"

#define FAKE extern "C" __attribute__((visibility("default")))

struct Line {
  float slope;
  double offset;
};

struct Library {
  std::string image;
  void* opened;  // of kernels that are compiled for the emulated GPU
  int device;    // of AMD's runtime, which loads for one
};

struct Kernel {
  std::string symbol;
  const FakeKernel* emulated;
  unsigned most_shared_bytes = 48 * 1024;
  int device = -1;
};

namespace {

int version = 13000, mode = 0, dependent = 0, loads = 0, loads_outside_of_graphs = 0,
    compilations = 0, launches = 0, last_cluster = 1;
std::string last_symbol, last_image, compiler, refused;
std::string architectures[4] = {"sm_90", "sm_90", "sm_90", "sm_90"};
int last_error = 0;  // that HIP keeps
constexpr int kRelaxed = 2, kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201,
              kNoBinary = 209, kNotFound = 500, kLaunchFailed = 719, kUnknown = 999;
thread_local int context = 0;  // of a device, from 1 on
thread_local std::string fault;

}  // namespace

#define MAY_REFUSE \
  if (refused == __func__) return kUnknown

// What the fakes saw, for the tests.
FAKE int fake_loads() { return loads; }
FAKE int fake_loads_outside_of_graphs() { return loads_outside_of_graphs; }
FAKE int fake_compilations() { return compilations; }
FAKE int fake_context() { return context; }
FAKE int fake_mode() { return mode; }
FAKE int fake_dependent_launches() { return dependent; }
FAKE const char* fake_symbol() { return last_symbol.c_str(); }
FAKE const char* fake_image() { return last_image.c_str(); }

// What fails from now on.
FAKE void fake_refuse(const char* function) { refused = function; }
FAKE void fake_version(int newest) { version = newest; }
// The words of a compiler that makes a library of a program for the emulated GPU.
FAKE void fake_compiler(const char* words) { compiler = words; }
FAKE void fake_card(int device, const char* architecture) { architectures[device] = architecture; }
FAKE int fake_last_error() { return last_error; }
FAKE void* fake_stream(int device) { return reinterpret_cast<void*>(0x700L + device); }
FAKE int fake_launches() { return launches; }
FAKE int fake_cluster() { return std::exchange(last_cluster, 1); }

FAKE int cuDriverGetVersion(int* newest) {
  MAY_REFUSE;
  *newest = version;
  return 0;
}
FAKE int cuCtxGetCurrent(void** current) {
  MAY_REFUSE;
  *current = reinterpret_cast<void*>(static_cast<long>(context));
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** of_device, int device) {
  MAY_REFUSE;
  *of_device = reinterpret_cast<void*>(device + 1L);
  return 0;
}
FAKE int cuCtxSetCurrent(void* current) {
  MAY_REFUSE;
  context = static_cast<int>(reinterpret_cast<long>(current));
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* other) {
  MAY_REFUSE;
  std::swap(mode, *other);
  return 0;
}
namespace {

// The library that an image is; null if it is none. Its file stays open, as the loader knows
// libraries by their names.
void* open_image(const char* image) {
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const size_t bytes = header->e_shoff + size_t{header->e_shnum} * header->e_shentsize;
  const int file = memfd_create("kernel", 0);
  if (write(file, image, bytes) != static_cast<ssize_t>(bytes)) return nullptr;
  return dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
}

int emulate(const FakeKernel& kernel, const unsigned* grid, const unsigned* block,
            unsigned shared_bytes, void* stream, void** parameters) {
  const int device = context - 1;
  if (stream != fake_stream(device)) return kInvalidContext;
  const std::string& architecture = architectures[device];
  if (kernel.architecture != architecture) return kNoBinary;
  const bool is_cuda = architecture.starts_with("sm_");
  const size_t most = is_cuda && version >= 12010 && architecture >= "sm_70" ? 32764 : 4096;
  if (kernel.parameter_bytes > most) return kInvalidValue;
  fault = kernel.launch(grid, block, shared_bytes, parameters);
  return fault.empty() ? 0 : kLaunchFailed;
}

}  // namespace

FAKE int cuLibraryLoadData(void** library, const char* image, void*, void*, unsigned, void*, void*,
                           unsigned) {
  MAY_REFUSE;
  if (context == 0) return kInvalidContext;
  const bool is_elf = std::memcmp(image, ELFMAG, SELFMAG) == 0;
  if (!is_elf && std::strncmp(image, "machine code", 12) != 0) return kInvalidImage;
  void* opened = is_elf ? open_image(image) : nullptr;
  if (is_elf && opened == nullptr) return kInvalidImage;
  loads += 1;
  loads_outside_of_graphs += mode == kRelaxed;
  last_image = image;
  *library = new Library{image, opened, context - 1};
  return 0;
}
FAKE int cuLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  MAY_REFUSE;
  last_symbol = symbol;
  void* opened = static_cast<Library*>(library)->opened;
  const void* emulated = opened ? dlsym(opened, symbol) : nullptr;
  if (opened && !emulated) return kNotFound;
  *kernel = new Kernel{symbol, static_cast<const FakeKernel*>(emulated)};
  return 0;
}
FAKE int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalidValue   ? "invalid argument"
          : error == kLaunchFailed ? fault.c_str()
          : error == kUnknown      ? "unknown error"
                                   : "device kernel image is invalid";
  return 0;
}
FAKE int cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        void* stream, void** parameters, void** extra) {
  MAY_REFUSE;
  if (context == 0) return kInvalidContext;
  launches += 1;
  if (shared_bytes > static_cast<Kernel*>(kernel)->most_shared_bytes) return kInvalidValue;
  if (const FakeKernel* emulated = static_cast<Kernel*>(kernel)->emulated) {
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return emulate(*emulated, grid, block, shared_bytes, stream, parameters);
  }
  bool is_plain = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1 && !extra;
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

// CUlaunchConfig.
struct Attribute {
  int id, hole;
  unsigned values[16];
};
struct Configuration {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
FAKE int cuLaunchKernelEx(const Configuration* as, void* kernel, void** parameters, void** extra) {
  MAY_REFUSE;
  bool begins_early = false;
  for (unsigned i = 0; i < as->count; ++i) {
    const Attribute& own = as->attributes[i];
    const unsigned* cluster = own.values;
    if (own.id == 6 && own.values[0] == 1) {  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_...
      begins_early = true;
    } else if (own.id == 4 && cluster[0] <= 8 && cluster[1] == 1 && cluster[2] == 1 &&
               as->grid[0] % cluster[0] == 0) {  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
      last_cluster = cluster[0];
    } else {
      return kInvalidValue;
    }
  }
  const int error =
      cuLaunchKernel(kernel, as->grid[0], as->grid[1], as->grid[2], as->block[0], as->block[1],
                     as->block[2], as->shared_bytes, as->stream, parameters, extra);
  dependent += begins_early && error == 0;
  return error;
}
FAKE int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  MAY_REFUSE;
  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; on compute capability 9.0 a card grants 227
  // KiB.
  if (attribute != 8 || device != context - 1 || value > 227 * 1024) return kInvalidValue;
  static_cast<Kernel*>(kernel)->most_shared_bytes = value;
  return 0;
}

struct Program {
  std::string source, name, code, log, symbol;
};

namespace {

std::string contents(const std::string& file) {
  std::ifstream opened(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(opened), {}};
}

// Namespaces of GPUs' kernels are those of the emulated GPU.
std::string emulated(std::string text) {
  for (size_t at = 0; (at = text.find("::gpu::", at)) != std::string::npos;) {
    text.replace(at, 7, "::emu::");
  }
  return text;
}

int compile_for_host(Program& program, int count, const char** options) {
  std::string folder = std::filesystem::temp_directory_path() / "fake-nvrtc-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return 6;
  const std::string file = folder + "/program";
  std::string command = compiler, architecture;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.starts_with("-I")) command += " " + option;
    if (option.find("architecture=") != std::string::npos || option.starts_with("--offload-arch")) {
      architecture = option.substr(option.find('=') + 1);
    }
  }
  const size_t hash = std::hash<std::string>()(program.name + architecture);
  program.symbol = "kernel_" + std::to_string(hash);
  std::ofstream(file + ".cpp") << emulated(program.source) << "FAKE_KERNEL(" << program.symbol
                               << ", \"" << architecture << "\", " << emulated(program.name)
                               << ")\n";
  command += " " + file + ".cpp -o " + file + ".so > " + file + ".log 2>&1";
  const bool failed = std::system(command.c_str()) != 0;
  program.code = contents(file + ".so");
  program.log = contents(file + ".log");
  std::filesystem::remove_all(folder);
  return failed ? 6 : 0;
}

}  // namespace

FAKE int nvrtcVersion(int* major, int* minor) {
  MAY_REFUSE;
  *major = 13, *minor = 7;
  return 0;
}
FAKE int nvrtcGetNumSupportedArchs(int* count) {
  MAY_REFUSE;
  *count = 3;
  return 0;
}
FAKE int nvrtcGetSupportedArchs(int* architectures) {
  MAY_REFUSE;
  architectures[0] = 75, architectures[1] = 90, architectures[2] = 120;
  return 0;
}
FAKE const char* nvrtcGetErrorString(int error) {
  return error == 6          ? "NVRTC_ERROR_COMPILATION"
         : error == kUnknown ? "NVRTC_ERROR_INTERNAL_ERROR"
                             : "NVRTC_ERROR_INVALID_INPUT";
}
FAKE int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**,
                            const char**) {
  MAY_REFUSE;
  *program = new Program{source, "", "", "", "_Z4drawIfEvPT_i4Line"};
  return 0;
}
FAKE int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
FAKE int nvrtcAddNameExpression(Program* program, const char* name) {
  MAY_REFUSE;
  program->name = name;
  return 0;
}
FAKE int nvrtcCompileProgram(Program* program, int count, const char** options) {
  MAY_REFUSE;
  if (!compiler.empty()) {
    compilations += 1;
    return compile_for_host(*program, count, options);
  }
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
  MAY_REFUSE;
  static thread_local std::string lowered;
  lowered = program->name == name ? program->symbol : "";
  *symbol = lowered.c_str();
  return lowered.empty();
}
FAKE int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  MAY_REFUSE;
  *size = program->log.size() + 1;
  return 0;
}
FAKE int nvrtcGetProgramLog(Program* program, char* log) {
  MAY_REFUSE;
  std::strcpy(log, program->log.c_str());
  return 0;
}
FAKE int nvrtcGetCUBINSize(Program* program, size_t* size) {
  MAY_REFUSE;
  *size = program->code.size();
  return 0;
}
FAKE int nvrtcGetCUBIN(Program* program, char* code) {
  MAY_REFUSE;
  std::memcpy(code, program->code.data(), program->code.size());
  return 0;
}
FAKE int nvrtcGetPTXSize(Program* program, size_t* size) {
  MAY_REFUSE;
  *size = program->code.size() + 4;
  return 0;
}
FAKE int nvrtcGetPTX(Program* program, char* code) {
  MAY_REFUSE;
  std::string text = program->code + " ptx";
  std::memcpy(code, text.data(), text.size());
  return 0;
}

// HIP's runtime: modules of a device, and an error that it keeps; and its compiler.

#define HIP_MAY_REFUSE \
  if (refused == __func__) return last_error = kUnknown

FAKE int hipRuntimeGetVersion(int* newest) {
  HIP_MAY_REFUSE;
  *newest = 60443482;
  return 0;
}
FAKE int hipDriverGetVersion(int* newest) { return hipRuntimeGetVersion(newest); }
FAKE int hipSetDevice(int device) {
  HIP_MAY_REFUSE;
  context = device + 1;
  return 0;
}
FAKE int hipThreadExchangeStreamCaptureMode(int* other) {
  HIP_MAY_REFUSE;
  return cuThreadExchangeStreamCaptureMode(other);
}
FAKE int hipModuleLoadData(void** module, const char* image) {
  HIP_MAY_REFUSE;
  return cuLibraryLoadData(module, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
}
FAKE int hipModuleGetFunction(void** kernel, void* module, const char* symbol) {
  HIP_MAY_REFUSE;
  const int error = cuLibraryGetKernel(kernel, module, symbol);
  if (error == 0) {
    static_cast<Kernel*>(*kernel)->device = static_cast<Library*>(module)->device;
    static_cast<Kernel*>(*kernel)->most_shared_bytes = 64 * 1024;
  }
  return error;
}
FAKE int hipModuleLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, void* stream, void** parameters,
                               void** extra) {
  HIP_MAY_REFUSE;
  last_error = static_cast<Kernel*>(kernel)->device != context - 1
                   ? kInvalidContext
                   : cuLaunchKernel(kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                    shared_bytes, stream, parameters, extra);
  return last_error;
}
FAKE int hipGetLastError() { return std::exchange(last_error, 0); }
FAKE const char* hipGetErrorString(int error) {
  const char* text = nullptr;
  cuGetErrorString(error, &text);
  return text;
}
FAKE const char* hiprtcGetErrorString(int error) {
  return error == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR_INTERNAL_ERROR";
}

// HIPRTC's functions are NVRTC's under another name, and refuse by that.
#define HIPRTC_AS(hiprtc, nvrtc, parameters, ...) \
  FAKE int hiprtc parameters {                    \
    MAY_REFUSE;                                   \
    return nvrtc(__VA_ARGS__);                    \
  }

HIPRTC_AS(hiprtcCreateProgram, nvrtcCreateProgram,
          (Program * *program, const char* source, const char* name, int count, const char** texts,
           const char** names),
          program, source, name, count, texts, names)
HIPRTC_AS(hiprtcDestroyProgram, nvrtcDestroyProgram, (Program * *program), program)
HIPRTC_AS(hiprtcAddNameExpression, nvrtcAddNameExpression, (Program * program, const char* name),
          program, name)
HIPRTC_AS(hiprtcCompileProgram, nvrtcCompileProgram,
          (Program * program, int count, const char** options), program, count, options)
HIPRTC_AS(hiprtcGetLoweredName, nvrtcGetLoweredName,
          (Program * program, const char* name, const char** symbol), program, name, symbol)
HIPRTC_AS(hiprtcGetProgramLogSize, nvrtcGetProgramLogSize, (Program * program, size_t* size),
          program, size)
HIPRTC_AS(hiprtcGetProgramLog, nvrtcGetProgramLog, (Program * program, char* log), program, log)
HIPRTC_AS(hiprtcGetCodeSize, nvrtcGetCUBINSize, (Program * program, size_t* size), program, size)
HIPRTC_AS(hiprtcGetCode, nvrtcGetCUBIN, (Program * program, char* code), program, code)
