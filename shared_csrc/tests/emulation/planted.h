// What planted bugs share: a list of cases, and operands that the emulator knows.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "apex/core/gpu.h"
#include "apex/core/pack.h"

namespace apex {

// Memory that kernels may use, for as long as it lives.
template <class T>
class Operand {
 public:
  Operand(const char* name, int count, emulation::Content content)
      : bytes_(count * sizeof(T) + 64), count_(count) {
    emulation::add_operand(data(), count * sizeof(T), sizeof(T), name, content);
  }
  ~Operand() { emulation::release_operand(data()); }
  Operand(const Operand&) = delete;

  // Aligned to 64 bytes, as what torch allocates.
  T* data() {
    auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }
  int count() const { return count_; }
  T& operator[](int i) { return data()[i]; }

 private:
  std::vector<char> bytes_;
  int count_;
};

template <class T>
struct Values : Operand<T> {
  Values(const char* name, int count) : Operand<T>(name, count, emulation::Content::kValues) {
    for (int i = 0; i < count; ++i) (*this)[i] = T(i % 7);
  }
};
template <class T>
struct Fresh : Operand<T> {
  Fresh(const char* name, int count) : Operand<T>(name, count, emulation::Content::kFresh) {}
};

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, const Arguments&... arguments) {
  emulation::emulate(kernel, grid, block, 0, nullptr, arguments...);
}

// Raised by a case itself where what kernels computed is wrong.
inline void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("wrong result: ") + what);
}

// A bug, as a template over whether it is there: its twin without it must pass.
struct Case {
  const char* name;
  void (*broken)();
  void (*correct)();
};

extern const std::vector<Case> kBoundsCases, kOrderCases, kWarpCases, kLaunchCases, kCostCases;

}  // namespace apex
