// The library of matrix products that the emulated GPU has: the one that APEX_EMULATE_BLASLT names,
// taken for cuBLASLt where warps have 32 lanes, and for hipBLASLt where they have 64.
#pragma once

#include <cstdlib>
#include <string_view>

namespace apex::blaslt {
inline namespace emu {

inline Library open_library() {
  const char* path = std::getenv("APEX_EMULATE_BLASLT");
  const char* lanes = std::getenv("APEX_EMULATE");
  if (path == nullptr || *path == '\0' || lanes == nullptr) return {};
  return {std::string_view(lanes) == "64" ? kHipblas : kCublas, std::span(&path, 1)};
}

}  // namespace emu
}  // namespace apex::blaslt
