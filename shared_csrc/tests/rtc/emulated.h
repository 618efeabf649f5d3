// What the fake NVRTC adds to a program that it compiles for the emulated GPU.
#pragma once

#include <exception>
#include <utility>

#include "kernel.h"

namespace fake {

template <auto kernel>
struct Entry;

template <class... Parameters, void (*kernel)(Parameters...)>
struct Entry<kernel> {
  template <size_t... each>
  static void launch_with(std::index_sequence<each...>, const unsigned* grid, const unsigned* block,
                          size_t shared_bytes, void** parameters) {
    apex::emulation::emulate(kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]},
                             shared_bytes, nullptr,
                             *static_cast<const Parameters*>(parameters[each])...);
  }
  static std::string launch(const unsigned* grid, const unsigned* block, size_t shared_bytes,
                            void** parameters) {
    try {
      launch_with(std::index_sequence_for<Parameters...>(), grid, block, shared_bytes, parameters);
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

}  // namespace fake

#define FAKE_KERNEL(symbol, architecture, ...)                                              \
  extern "C" __attribute__((visibility("default")))                                         \
  const FakeKernel symbol = {architecture, ParameterBytes<decltype(&__VA_ARGS__)>::count(), \
                             &fake::Entry<__VA_ARGS__>::launch};
