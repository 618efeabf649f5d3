// What was launched, a line for each launch in the file that APEX_EMULATE_TRACE names: whoever runs
// tests reads from it which ways of the engines were taken. Fields are separated by tabs:
//
//   library and offset of the kernel | grid | block | numbers among its parameters |
//   elements of the largest operand that was used by packs, by single elements, and by both
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "machine.h"

namespace apex::emulation {
namespace {

constexpr uint8_t kByPacks = 1, kByElements = 2;

}  // namespace

void Machine::touch(const Region& region, size_t bytes) {
  if (region.kind != Kind::kOperand) return;
  touched_[&region - regions_.operands().data()] |=
      bytes > region.element_bytes ? kByPacks : kByElements;
}

void Machine::write_trace() const {
  const char* path = std::getenv("APEX_EMULATE_TRACE");
  if (path == nullptr || *path == 0) return;
  size_t elements[4] = {};
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Region& region = regions_.operands()[i];
    if (region.name == "workspace") continue;  // of bytes, whatever is in it
    elements[touched_[i]] =
        std::max(elements[touched_[i]], (region.end - region.begin) / region.element_bytes);
  }
  std::string numbers;
  for (int64_t number : launch.numbers) numbers += " " + std::to_string(number);
  FILE* file = std::fopen(path, "a");
  if (file == nullptr) throw std::runtime_error(std::string("emulated GPU: cannot write ") + path);
  const dim3 &grid = launch.grid, &block = launch.block;
  std::fprintf(file, "%s\t%u %u %u\t%u %u %u\t%s\t%zu %zu %zu\n",
               image_and_offset(launch.kernel).c_str(), grid.x, grid.y, grid.z, block.x, block.y,
               block.z, numbers.c_str(), elements[kByPacks], elements[kByElements],
               elements[kByPacks | kByElements]);
  std::fclose(file);
}

}  // namespace apex::emulation
