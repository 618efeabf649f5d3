// What was launched, a line for each launch in the file that APEX_EMULATE_TRACE names: whoever runs
// tests reads from it which ways of the engines were taken. Fields are separated by tabs:
//
//   library and offset of the kernel | grid | block | numbers among its parameters |
//   elements of the largest operand that was used by packs, by single elements, and by both
//
// With APEX_EMULATE_COUNTS (counts.h) a line is "allocation" for each new tensor or workspace, and
// further fields follow:
//
//   threads that used an operand, and bytes of dynamic shared memory |
//   loads | stores, each as accesses, bytes, sectors, sectors that were needed, and distinct bytes
//   | operands but workspaces, each as address, when it was made, distinct bytes read and written
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "machine.h"

namespace apex::emulation {
namespace {

constexpr uint8_t kByPacks = 1, kByElements = 2;

const char* path_of_trace() {
  const char* path = std::getenv("APEX_EMULATE_TRACE");
  return path == nullptr || *path == 0 ? nullptr : path;
}

void append(const char* path, const std::string& line) {
  FILE* file = std::fopen(path, "a");
  if (file == nullptr) throw std::runtime_error(std::string("emulated GPU: cannot write ") + path);
  std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
}

std::string spaced(const dim3& size) {
  return std::to_string(size.x) + " " + std::to_string(size.y) + " " + std::to_string(size.z);
}

}  // namespace

void Machine::touch(const Region& region, size_t bytes) {
  if (region.kind != Kind::kOperand) return;
  touched_[&region - regions_.operands().data()] |=
      bytes > region.element_bytes ? kByPacks : kByElements;
}

void Machine::count(const Region& region, uintptr_t address, size_t bytes, Access access,
                    const void* pc) {
  bool is_store = access != Access::kRead;
  // An atomic has no address of code, but a line of the source.
  const void* place = pc ? pc : reinterpret_cast<const void*>(intptr_t{fiber->site.line});
  counts_.see(fiber->number, fiber->warp, place, address, bytes, is_store);
  size_t distinct = 0;
  for (uintptr_t at = address; at < address + bytes; ++at) {
    const Cell& cell = shadow.at(at);
    distinct += (is_store ? cell.write_interval : cell.read_interval) < launch_start_;
  }
  counts_.add_distinct(&region - regions_.operands().data(), distinct, is_store);
}

std::string Machine::counted() const {
  if (counts_.distinct().empty()) return "";
  std::string all =
      "\t" + std::to_string(counts_.threads) + " " + std::to_string(launch.shared_bytes);
  for (const Traffic& of : {counts_.loads, counts_.stores}) {
    all += "\t";
    for (uint64_t number : {of.accesses, of.bytes, of.sectors, of.needed, of.distinct}) {
      all += std::to_string(number) + " ";
    }
  }
  all += "\t";
  for (size_t i = 0; i < counts_.distinct().size(); ++i) {
    const Region& region = regions_.operands()[i];
    auto [read, written] = counts_.distinct()[i];
    if (read + written == 0 || region.name == "workspace") continue;
    for (uint64_t number : {uint64_t{region.begin}, uint64_t{region.fresh_since}, read, written}) {
      all += std::to_string(number) + " ";
    }
  }
  return all;
}

void Machine::count_allocation() const {
  const char* path = path_of_trace();
  if (path != nullptr && std::getenv("APEX_EMULATE_COUNTS") != nullptr) {
    append(path, "allocation");
  }
}

void Machine::write_trace() const {
  const char* path = path_of_trace();
  if (path == nullptr) return;
  size_t elements[4] = {};
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Region& region = regions_.operands()[i];
    if (region.name == "workspace") continue;  // of bytes, whatever is in it
    elements[touched_[i]] =
        std::max(elements[touched_[i]], (region.end - region.begin) / region.element_bytes);
  }
  std::string numbers;
  for (int64_t number : launch.numbers) numbers += " " + std::to_string(number);
  append(path, image_and_offset(launch.kernel) + "\t" + spaced(launch.grid) + "\t" +
                   spaced(launch.block) + "\t" + numbers + "\t" +
                   std::to_string(elements[kByPacks]) + " " +
                   std::to_string(elements[kByElements]) + " " +
                   std::to_string(elements[kByPacks | kByElements]) + counted());
}

}  // namespace apex::emulation
