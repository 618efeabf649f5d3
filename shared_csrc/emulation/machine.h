// The emulated GPU: fibers for the threads of a block, a scheduler, and the checks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include "counts.h"
#include "memory.h"

namespace apex::emulation {

inline constexpr size_t kStackBytes = 128 * 1024;
inline constexpr int kMaxThreads = 1024;
inline constexpr size_t kArenaBytes = 256 * 1024;
inline constexpr size_t kGapBytes =
    256;  // between shared variables, so that none is behind another

// What every supported GPU grants: sm_80's limits and gfx90a's, whichever is stricter.
inline constexpr size_t kMaxSharedBytes = 48 * 1024;  // sm_80 without opting in; gfx90a has 64 KiB
inline constexpr uint64_t kMaxGrid[3] = {0x7fffffff, 65535, 65535};
inline constexpr unsigned kMaxBlock[3] = {1024, 1024, 64};
inline constexpr uint64_t kMaxThreadsPerDimension = 0xffffffff;  // of a whole grid, in HIP

enum class State { kReady, kAtBarrier, kAtCollective, kReturned };
enum class Access { kRead, kWrite, kAtomic };

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  char* stack = nullptr;
  bool is_started = false;
  State state = State::kReturned;
  Index index;
  int number, warp, lane;
  Site site;
  // Of the collective that it waits in:
  Collective kind;
  uint64_t mask, value;
  int argument, width;
};

// A write over another thread's write: allowed if it turns out to change nothing.
struct Overwrite {
  uintptr_t address = 0;
  size_t bytes = 0;
  uint64_t before = 0;
  uint32_t interval = 0;  // the other write's
  uint16_t thread = 0;
  const void* pc = nullptr;
};

class Machine {
 public:
  void run(const Launch& launch);

  // Called by the running kernel.
  void wait_at_barrier(Site site);
  uint64_t wait_in_collective(Collective kind, uint64_t mask, uint64_t value, int argument,
                              int width, Site site);
  void* shared_variable(const void* key, const char* name, size_t bytes, size_t alignment);
  void* dynamic_shared();
  void access(uintptr_t address, size_t bytes, Access access, const void* pc);
  [[noreturn]] void fault(const std::string& what, const std::string& look_for, const void* pc,
                          Site site = {nullptr, 0});

  void count_allocation() const;
  // Raises unless all of a fresh operand's bytes were written.
  void check_written(const void* key);

  Operands operands;
  Shadow shadow;
  uint32_t interval = 1;  // the number of the current one
  int open_contexts = 0;
  Fiber* fiber = nullptr;  // that runs
  Index block{};
  Launch launch{};
  int width = 32;

 private:
  void check_launch() const;
  void check_size() const;
  void prepare_fibers();
  void run_blocks();
  std::string values() const;  // of all operands
  void compare(const std::string& expected) const;
  void touch(const Region& region, size_t bytes);
  void count(const Region& region, uintptr_t address, size_t bytes, Access access, const void* pc);
  void write_trace() const;
  std::string counted() const;
  void begin_block(uint64_t number);
  void run_block(uint64_t number);
  [[noreturn]] void abandon();
  void enter(Fiber& fiber);
  void resume(Fiber& fiber);
  void pause();
  static void fiber_main();

  // scheduler
  uint64_t block_at(uint64_t step) const;
  void shuffle_threads(uint64_t seed);
  bool resolve_collectives(bool is_stuck);
  bool resolve_masked(int warp, Fiber& first, bool is_stuck);
  bool resolve_in_step(int warp, bool is_stuck);
  void execute(const std::vector<Fiber*>& lanes);
  int source_of(const Fiber& lane) const;
  void release_barrier();
  [[noreturn]] void fault_in(Fiber& fiber, const std::string& what, const std::string& look_for);
  std::string describe(const Fiber* lane) const;
  Fiber* lane_of(int warp, int lane);

  // memory
  [[noreturn]] void fault_outside(uintptr_t address, size_t bytes, Access access, const void* pc);
  void visit(const Region& region, uintptr_t address, size_t bytes, Access access, const void* pc);
  void check_race(const Region& region, uintptr_t address, const Cell& cell, Access access,
                  size_t bytes, uintptr_t start, const void* pc);
  void record(Cell& cell, Access access, uint32_t start_of_sharing);
  bool is_ordered(uint16_t thread, uint16_t turn) const;
  [[noreturn]] void fault_race(const Region& region, uintptr_t address, const char* first,
                               uint32_t interval, uint16_t thread, Access access, const void* pc);
  std::string place(const Region& region, uintptr_t address, size_t bytes) const;
  void settle();

  std::vector<Fiber> fibers_;
  std::vector<int> order_;
  int threads_ = 0;
  jmp_buf scheduler_;
  std::string report_;

  Regions regions_;
  uint32_t launch_start_ = 0, block_start_ = 0;
  uint16_t turns_[kMaxThreads / 32] = {};
  Overwrite overwrite_;
  char* arena_ = nullptr;  // shared memory
  size_t arena_used_ = 0, static_bytes_ = 0;
  std::vector<std::pair<const void*, void*>> shared_;
  uint64_t seed_ = 0, launches_ = 0;
  std::vector<uint8_t> touched_;  // how this launch has used each operand, see trace.cpp
  Counts counts_;
};

Machine& machine();
// Null while no kernel code runs on this thread of the host.
extern thread_local Machine* running __attribute__((tls_model("initial-exec")));

// Takes the emulator's own work out of what is watched.
struct Unwatched {
  Machine* before = running;
  Unwatched() { running = nullptr; }
  ~Unwatched() { running = before; }
};

std::string source_of(const void* pc);             // "foreach_gpu.h:75 (load_pack)", or empty
std::string kernel_name(const void* kernel);       // "foreach_kernel<...>"
std::string image_and_offset(const void* kernel);  // "/path/of/the/library 0x1a2b"
bool is_constant(uintptr_t address, size_t bytes);
std::string text(const Index& index);
std::string text(const Site& site);

}  // namespace apex::emulation
