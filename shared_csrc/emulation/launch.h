// Launching on the emulated GPU, and telling it which memory kernels may use.
#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "device.h"

namespace apex::emulation {

struct Launch {
  void (*invoke)(const void* call);
  const void* call;  // holds the parameters, which kernels may read
  size_t call_bytes;
  size_t parameter_bytes;  // as a GPU counts them
  const void* kernel;      // the function, for its name
  dim3 grid, block;
  size_t shared_bytes;
  Stream* stream;
  std::vector<int64_t> numbers;  // that are parameters, as rows and columns are, in their order
};

// Runs every block; raises std::runtime_error with a report of the first fault.
void run(const Launch& launch);

// Of a kernel: with warps of 32 lanes as of CUDA 12.1 on, with those of 64 what every GPU grants.
size_t most_parameter_bytes();

// The only stream, there while an op has a context: a launch without one is a fault.
Stream* open_stream();
void close_stream();

// Memory that kernels may use until it is released. What is fresh must be written before it is
// read.
enum class Content { kValues, kFresh };
void add_operand(const void* data, size_t bytes, size_t element_bytes, const std::string& name,
                 Content content);
void release_operand(const void* data);
// Raises where a fresh operand has bytes that no kernel wrote.
void check_written(const void* data);
// The name of a tensor that the op has asked the address of, for reports.
void name_operand(const void* data, const std::string& name);

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> parameters;

  static void invoke(const void* call) {
    const Call& self = *static_cast<const Call*>(call);
    std::apply(self.kernel, self.parameters);
  }
};

// For who asks what a launch was: integers, and how many tensors or segments a parameter is of.
template <class T>
void add_numbers(std::vector<int64_t>& numbers, const T& parameter) {
  if constexpr (std::is_integral_v<T>) {
    numbers.push_back(parameter);
  } else if constexpr (requires { parameter.tensors + 0; }) {
    numbers.push_back(parameter.tensors);
  } else if constexpr (requires { parameter.rows + parameter.count + parameter.heads; }) {
    numbers.insert(numbers.end(), {parameter.rows, parameter.count, parameter.heads});
  } else if constexpr (requires { parameter.rows_a_block + parameter.tiles + parameter.packs; }) {
    numbers.insert(numbers.end(), {parameter.rows_a_block, parameter.tiles, parameter.packs});
  }
}

template <class... Parameters, class... Arguments>
void emulate(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
             Stream* stream, const Arguments&... arguments) {
  Call<Parameters...> call{kernel, {arguments...}};
  size_t parameter_bytes = 0;
  ((parameter_bytes =
        (parameter_bytes + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) +
        sizeof(Parameters)),
   ...);
  std::vector<int64_t> numbers;
  std::apply([&](const auto&... each) { (add_numbers(numbers, each), ...); }, call.parameters);
  run({&Call<Parameters...>::invoke, &call, sizeof(call), parameter_bytes,
       reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, numbers});
}

}  // namespace apex::emulation
