// Checks of every access of a kernel: bounds, values never written, races.
#include <stdexcept>

#include "machine.h"

namespace apex::emulation {
namespace {

uint64_t bytes_at(uintptr_t address, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) {
    value |= uint64_t{*reinterpret_cast<const unsigned char*>(address + i)} << (8 * i);
  }
  return value;
}

const char* verb(Access access) {
  return access == Access::kRead ? "read" : access == Access::kWrite ? "write" : "atomic";
}

}  // namespace

void Machine::access(uintptr_t address, size_t bytes, Access access, const void* pc) {
  if (address - reinterpret_cast<uintptr_t>(fiber->stack) < kStackBytes || bytes == 0) return;
  Unwatched unwatched;
  settle();
  const Region* region = regions_.find(address, bytes);
  if (region == nullptr) {
    if (access == Access::kRead && is_constant(address, bytes)) return;
    fault_outside(address, bytes, access, pc);
  }
  if (region->kind != Kind::kParameters) return visit(*region, address, bytes, access, pc);
  if (access == Access::kRead) return;
  fault("write to the parameters of the launch",
        "Parameters are copies that threads must not change.", pc);
}

void Machine::visit(const Region& region, uintptr_t address, size_t bytes, Access access,
                    const void* pc) {
  touch(region, bytes);
  if (counts_.is_on() && region.kind == Kind::kOperand) count(region, address, bytes, access, pc);
  uint32_t start_of_sharing = region.kind == Kind::kShared ? block_start_ : launch_start_;
  Cell seen{}, next{};  // mostly all bytes of an access have the same past
  bool has_seen = false;
  for (uintptr_t at = address; at < address + bytes; ++at) {
    Cell& cell = shadow.at(at);
    if (!has_seen || memcmp(&cell, &seen, sizeof(Cell)) != 0) {
      if (access != Access::kWrite && region.fresh_since > cell.write_interval) {
        fault(
            "read of memory that nothing was written to: " + place(region, address, bytes),
            "Does a tail, a lane or a first round lack its write? Accumulators need a first value.",
            pc);
      }
      check_race(region, at, cell, access, bytes, address, pc);
      seen = next = cell;
      has_seen = true;
      record(next, access, start_of_sharing);
    }
    cell = next;
  }
}

// Whether what a thread of this block did in this interval has happened before what is done now.
bool Machine::is_ordered(uint16_t thread, uint16_t turn) const {
  int other = thread & kThreadMask;
  if (thread & kSeveral) return false;
  if (other / width != fiber->warp) return false;
  return turn < turns_[fiber->warp] || (other == fiber->number && !(thread & kSeveralInWarp));
}

void Machine::check_race(const Region& region, uintptr_t address, const Cell& cell, Access access,
                         size_t bytes, uintptr_t start, const void* pc) {
  // Blocks have their own shared memory at what is one address here.
  uint32_t start_of_sharing = region.kind == Kind::kShared ? block_start_ : launch_start_;
  bool both_atomic = access == Access::kAtomic && (cell.write_thread & kAtomic);
  if (cell.write_interval >= start_of_sharing && !both_atomic) {
    bool is_race =
        cell.write_interval < block_start_ ||
        (cell.write_interval == interval && !is_ordered(cell.write_thread, cell.write_turn));
    if (is_race && access == Access::kWrite && bytes <= 8 && !(cell.write_thread & kAtomic)) {
      if (overwrite_.bytes == 0) {
        overwrite_ = {start, bytes, bytes_at(start, bytes), cell.write_interval, cell.write_thread,
                      pc};
      }
    } else if (is_race) {
      fault_race(region, address, "written", cell.write_interval, cell.write_thread, access, pc);
    }
  }
  if (access == Access::kRead || cell.read_interval < start_of_sharing) return;
  if ((cell.read_thread & kAtomic) && access == Access::kAtomic) return;
  bool is_race = cell.read_interval < block_start_ || (cell.read_thread & kSeveralBlocks) ||
                 (cell.read_interval == interval && !is_ordered(cell.read_thread, cell.read_turn));
  if (is_race) {
    fault_race(region, address, "read", cell.read_interval, cell.read_thread, access, pc);
  }
}

void Machine::record(Cell& cell, Access access, uint32_t start_of_sharing) {
  uint16_t own = static_cast<uint16_t>(fiber->number), turn = turns_[fiber->warp];
  uint16_t atomic = access == Access::kAtomic ? kAtomic : 0;
  if (access != Access::kRead) {
    cell.write_interval = interval;
    cell.write_thread = own | atomic;
    cell.write_turn = turn;
  }
  if (access == Access::kWrite) return;
  uint16_t reader = own | atomic;
  if (cell.read_interval >= start_of_sharing) {
    uint16_t before = cell.read_thread;
    if (cell.read_interval < block_start_ || (before & kSeveralBlocks)) {
      reader = own | kSeveralBlocks | (atomic & before);
    } else if (cell.read_interval == interval && !is_ordered(before, cell.read_turn)) {
      bool in_warp = (before & kThreadMask) / width == fiber->warp && !(before & kSeveral);
      reader = own | (in_warp ? kSeveralInWarp : kSeveral) | (atomic & before);
    } else {
      reader =
          own | atomic |
          (cell.read_interval == interval && turn == cell.read_turn ? before & kSeveralInWarp : 0);
    }
  }
  cell.read_interval = interval;
  cell.read_thread = reader;
  cell.read_turn = turn;
}

// Two threads that write the same value do no harm: flags are set so.
void Machine::settle() {
  if (overwrite_.bytes == 0) return;
  Unwatched unwatched;
  Overwrite done = overwrite_;
  overwrite_.bytes = 0;
  if (bytes_at(done.address, done.bytes) == done.before) return;
  const Region* region = regions_.find(done.address, done.bytes);
  fault_race(*region, done.address, "written", done.interval, done.thread, Access::kWrite, done.pc);
}

void Machine::fault_race(const Region& region, uintptr_t address, const char* first, uint32_t then,
                         uint16_t thread, Access access, const void* pc) {
  bool in_block = then >= block_start_ && !(thread & kSeveralBlocks);
  std::string other;
  int number = thread & kThreadMask;
  if (in_block && (thread & (kSeveral | kSeveralInWarp))) {
    other = "several threads of the same block";
  } else if (in_block) {
    other = "thread " + text(fibers_[number].index) + " of the same block";
  } else {
    other = "another block";
  }
  fault(std::string("race: ") + place(region, address, 1) + " was " + first + " by " + other +
            ", and this thread's " + verb(access) + " is not ordered against that",
        in_block ? "A __syncthreads() (within a warp, a __syncwarp()) belongs between the two."
                 : "Blocks run in any order: give each its own output, use atomics, or a second "
                   "launch.",
        pc);
}

std::string Machine::place(const Region& region, uintptr_t address, size_t bytes) const {
  uintptr_t offset = address - region.begin;
  std::string where =
      (region.kind == Kind::kShared ? "shared memory `" : "operand `") + region.name + "`, ";
  if (region.element_bytes > 0 && offset % region.element_bytes == 0) {
    where += "element " + std::to_string(offset / region.element_bytes) + " of " +
             std::to_string((region.end - region.begin) / region.element_bytes);
  } else {
    where += "byte " + std::to_string(offset) + " of " + std::to_string(region.end - region.begin);
  }
  return where + (bytes > region.element_bytes && region.element_bytes > 0
                      ? " (" + std::to_string(bytes) + " bytes)"
                      : "");
}

void Machine::fault_outside(uintptr_t address, size_t bytes, Access access, const void* pc) {
  std::string what = std::string(verb(access)) + " of " + std::to_string(bytes) + " bytes ";
  const Region* near = regions_.nearest(address);
  const std::string* name = operands.released(address, bytes);
  if (name != nullptr &&
      (near == nullptr || (address > near->end + 64 || address + 64 < near->begin))) {
    fault("use after free: " + what + "of `" + *name + "`, which was released",
          "The tensor must live until the last launch that uses it.", pc);
  }
  if (near == nullptr) {
    fault(
        "access to memory that belongs to no operand: " + what + "at address " +
            std::to_string(address),
        "A pointer to the host's memory, a released or uninitialized pointer, or an index far off.",
        pc);
  }
  bool is_behind = address + bytes > near->end;
  uintptr_t distance =
      is_behind ? (address > near->end ? address - near->end : 0) : near->begin - address;
  fault("out of bounds: " + what + std::to_string(distance) + " bytes " +
            (is_behind ? "behind the end of " : "before ") +
            (near->kind == Kind::kShared ? "shared memory `" : "`") + near->name + "` (" +
            std::to_string((near->end - near->begin) / near->element_bytes) + " elements of " +
            std::to_string(near->element_bytes) + " bytes)",
        "A bound that is off by one, or a tail that is handled as a full pack.", pc);
}

void Machine::check_written(const void* key) {
  const Operands::Entry* entry = operands.find(key);
  bool was_launched = entry != nullptr && interval > entry->known_since;
  if (!was_launched || entry->fresh_since == 0) return;
  for (uintptr_t at = entry->begin; at < entry->begin + entry->bytes; ++at) {
    if (shadow.at(at).write_interval >= entry->fresh_since) continue;
    for (const Region& region : operands.regions()) {
      if (region.begin != entry->begin || region.end != entry->begin + entry->bytes) continue;
      throw std::runtime_error(
          "emulated GPU: output that no kernel wrote: " + place(region, at, 1) +
          "\n  last kernel: " + kernel_name(launch.kernel) +
          "\n  look for: a tail that is left out, or rows beyond the grid.");
    }
  }
}

}  // namespace apex::emulation
