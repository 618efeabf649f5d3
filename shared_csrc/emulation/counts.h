// What a launch costs in memory: how often it loads and stores, in how many sectors, how much anew.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace apex::emulation {

// Of loads, or of stores and atomics, to operands in global memory.
struct Traffic {
  uint64_t accesses = 0;  // of one thread each
  uint64_t bytes = 0;     // that threads asked for
  uint64_t sectors = 0;   // of 32 bytes, that warps touch; what memory moves
  uint64_t needed = 0;    // sectors, if what a warp asks for at once lay side by side
  uint64_t distinct = 0;  // bytes, each counted once a launch
};

// Off unless APEX_EMULATE_COUNTS is set. An access of a warp is what its lanes do at the same place
// in the code for the same time: lanes run one after the other here, so that they are put together
// when the block has ended.
class Counts {
 public:
  void begin(bool is_on, size_t operands) {
    *this = Counts{};
    is_on_ = is_on;
    if (is_on) distinct_.resize(operands);
  }
  bool is_on() const { return is_on_; }
  void stop() { is_on_ = false; }

  void see(int thread, int warp, const void* place, uintptr_t address, size_t bytes, bool is_store);
  // Of an operand by its number, bytes that this launch had not read, or written, before.
  void add_distinct(size_t operand, size_t bytes, bool is_store) {
    of(is_store).distinct += bytes;
    (is_store ? distinct_[operand].written : distinct_[operand].read) += bytes;
  }
  void end_block();

  struct Distinct {
    uint64_t read = 0, written = 0;
  };
  const std::vector<Distinct>& distinct() const { return distinct_; }

  uint64_t threads = 0;  // that used an operand at all
  Traffic loads, stores;

 private:
  struct Seen {
    uint64_t group;  // a number of a warp and of loads or stores
    const void* place;
    uint32_t time;  // how often the thread was there before
    uint32_t bytes;
    uintptr_t address;
  };
  struct Visits {
    const void* place;
    uint32_t times;
  };
  Traffic& of(bool is_store) { return is_store ? stores : loads; }

  bool is_on_ = false;
  std::vector<Distinct> distinct_;           // by operand
  std::vector<Seen> seen_;                   // in this block
  std::vector<std::vector<Visits>> visits_;  // by thread
};

}  // namespace apex::emulation
