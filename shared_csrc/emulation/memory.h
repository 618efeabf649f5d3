// Which memory kernels may use, and who used each byte of it last.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch.h"

namespace apex::emulation {

enum class Kind { kOperand, kShared, kParameters };

struct Region {
  uintptr_t begin, end;
  size_t element_bytes;
  Kind kind;
  // 0, or: a byte has a value only where it was written in this interval or later.
  uint32_t fresh_since;
  std::string name;

  bool holds(uintptr_t address, size_t bytes) const {
    return address >= begin && address + bytes <= end;
  }
};

// An op's operands, sorted for lookup (they may overlap, and there may be thousands), and the few
// regions of one launch or one block.
class Regions {
 public:
  void set_operands(std::vector<Region> operands);
  const std::vector<Region>& operands() const { return operands_; }
  void add_local(Region region);
  void remove_local(Kind kind);
  const Region* find(uintptr_t address, size_t bytes) const;
  const Region* nearest(uintptr_t address) const;

 private:
  void forget_found();

  std::vector<Region> operands_, local_;
  std::vector<uintptr_t> furthest_end_;  // of all operands up to this one
  mutable const Region* found_[6] = {};  // last
  mutable unsigned turn_ = 0;
};

// Who wrote and who read a byte last. Intervals are numbered through all launches; a barrier of a
// block begins a new one.
struct Cell {
  uint32_t write_interval, read_interval;
  uint16_t write_thread, read_thread;  // with flags
  uint16_t write_turn, read_turn;      // number of the warp's barriers before
};
inline constexpr uint16_t kThreadMask = 0x03ff;
inline constexpr uint16_t kSeveralInWarp = 0x0400;
inline constexpr uint16_t kSeveral = 0x0800;
inline constexpr uint16_t kSeveralBlocks = 0x1000;
inline constexpr uint16_t kAtomic = 0x8000;

class Shadow {
 public:
  Cell& at(uintptr_t address) {
    uintptr_t page = address / kPageBytes;
    Entry& entry = recent_[page % kRecent];
    if (entry.page != page) entry = {page, page_of(page)};
    return entry.cells[address % kPageBytes];
  }
  // Frees what is remembered once that is a lot.
  void trim();

 private:
  static constexpr size_t kPageBytes = 4096, kRecent = 256, kMaxPages = 4096;
  struct Entry {
    uintptr_t page;
    Cell* cells;
  };
  Cell* page_of(uintptr_t page);

  std::unordered_map<uintptr_t, std::vector<Cell>> pages_;
  Entry recent_[kRecent] = {};
};

// The memory that an op has shown: tensors by handle, or operands of a test.
class Operands {
 public:
  struct Entry {
    uintptr_t begin;
    size_t bytes, element_bytes;
    uint32_t fresh_since;
    uint32_t known_since;  // the interval in which it was shown
    std::string name;
  };

  void add(const void* key, Entry entry);
  void remove(const void* key);
  void forget_fresh(const void* key);  // others may have written to it
  void name(const void* data, const std::string& name);
  const Entry* find(const void* key) const;
  std::vector<Region> regions() const;
  // The name of an operand that was there and has been released, or null.
  const std::string* released(uintptr_t address, size_t bytes) const;
  bool empty() const { return entries_.empty(); }
  bool changed = false;

 private:
  std::unordered_map<const void*, Entry> entries_;
  std::unordered_map<uintptr_t, std::string> names_;
  std::vector<Region> graveyard_;  // the last few
};

}  // namespace apex::emulation
