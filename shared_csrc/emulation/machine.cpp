// Launches, fibers, and what a running kernel asks of the emulator.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "machine.h"

namespace apex::emulation {

thread_local Machine* running __attribute__((tls_model("initial-exec"))) = nullptr;

Machine& machine() {
  thread_local Machine* own = new Machine;  // never freed: fibers of an aborted launch refer to it
  return *own;
}

namespace {

char* map(size_t bytes, size_t guard) {
  void* memory = mmap(nullptr, bytes + guard, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("emulated GPU: no memory for stacks.");
  if (guard > 0) mprotect(memory, guard, PROT_NONE);
  return static_cast<char*>(memory) + guard;
}

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == 0 ? otherwise : std::strtoull(value, nullptr, 10);
}

[[noreturn]] void refuse(const Launch& launch, const std::string& what) {
  throw std::runtime_error("emulated GPU: a launch that GPUs refuse: " + what +
                           "\n  kernel: " + kernel_name(launch.kernel));
}

}  // namespace

void Machine::check_launch() const {
  const unsigned* block = &launch.block.x;
  const unsigned* grid = &launch.grid.x;
  uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
  for (int d = 0; d < 3; ++d) {
    const char axis = "xyz"[d];
    if (block[d] == 0 || block[d] > kMaxBlock[d]) {
      refuse(launch, std::string("block.") + axis + " is " + std::to_string(block[d]) +
                         ", expected 1 to " + std::to_string(kMaxBlock[d]) + ".");
    }
    if (grid[d] == 0 || grid[d] > kMaxGrid[d]) {
      refuse(launch, std::string("grid.") + axis + " is " + std::to_string(grid[d]) +
                         ", expected 1 to " + std::to_string(kMaxGrid[d]) + ".");
    }
    if (uint64_t{grid[d]} * block[d] > kMaxThreadsPerDimension) {
      refuse(launch, std::string("the grid has 2^32 threads or more along ") + axis +
                         ", which HIP does not take.");
    }
  }
  if (threads > kMaxThreads) {
    refuse(launch, std::to_string(threads) + " threads per block, expected at most 1024.");
  }
  if (launch.shared_bytes > kMaxSharedBytes) {
    refuse(launch, std::to_string(launch.shared_bytes) +
                       " bytes of dynamic shared memory, expected at most 49152.");
  }
  if (launch.parameter_bytes > most_parameter_bytes()) {
    refuse(launch, std::to_string(launch.parameter_bytes) +
                       " bytes of parameters, expected at most " +
                       std::to_string(most_parameter_bytes()) + ".");
  }
  if (open_contexts == 0 || reinterpret_cast<const Machine*>(launch.stream) == this) return;
  refuse(launch, "the stream is not the current one of the op's context.");
}

void Machine::run(const Launch& wanted) {
  launch = wanted;
  check_launch();
  width = static_cast<int>(number_from("APEX_EMULATE", 32));
  if (width != 32 && width != 64) {
    throw std::runtime_error("APEX_EMULATE must be 32 or 64 (lanes per warp), got " +
                             std::to_string(width) + ".");
  }
  seed_ = number_from("APEX_EMULATE_SEED", 0);
  ++launches_;
  prepare_fibers();
  if (operands.changed) regions_.set_operands(operands.regions());
  operands.changed = false;
  check_size();
  touched_.assign(regions_.operands().size(), 0);
  uint64_t orders = number_from("APEX_EMULATE_ORDERS", 1);
  std::string before = orders > 1 ? values() : "";
  counts_.begin(number_from("APEX_EMULATE_COUNTS", 0) != 0, touched_.size());
  run_blocks();
  counts_.stop();
  for (uint64_t order = 1; order < orders; ++order) {
    std::string first = values();
    size_t offset = 0;
    for (const Region& region : regions_.operands()) {
      memcpy(reinterpret_cast<void*>(region.begin), &before[offset], region.end - region.begin);
      offset += region.end - region.begin;
    }
    ++seed_;
    run_blocks();
    compare(first);
  }
  write_trace();
}

void Machine::run_blocks() {
  auto begin = reinterpret_cast<uintptr_t>(launch.call);
  regions_.remove_local(Kind::kParameters);
  regions_.add_local({begin, begin + launch.call_bytes, 1, Kind::kParameters, 0, "parameters"});
  const std::vector<Region>& regions = regions_.operands();
  bool has_fresh = std::any_of(regions.begin(), regions.end(),
                               [](const Region& region) { return region.fresh_since > 0; });
  if (!has_fresh) shadow.trim();  // it also knows what has been written
  launch_start_ = interval + 1;
  uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  for (uint64_t step = 0; step < blocks; ++step) run_block(block_at(step));
  ++interval;
}

// Raises where the operands are larger than whoever runs tests wants to wait for.
void Machine::check_size() const {
  uint64_t limit = number_from("APEX_EMULATE_MAX_BYTES", ~uint64_t{0}), bytes = 0;
  for (const Region& region : regions_.operands()) bytes += region.end - region.begin;
  if (bytes <= limit) return;
  throw std::runtime_error("emulated GPU: too large: " + std::to_string(bytes) +
                           " bytes of operands, APEX_EMULATE_MAX_BYTES is " +
                           std::to_string(limit) + ".");
}

std::string Machine::values() const {
  std::string all;
  for (const Region& region : regions_.operands()) {
    all.append(reinterpret_cast<const char*>(region.begin), region.end - region.begin);
  }
  return all;
}

void Machine::compare(const std::string& expected) const {
  size_t offset = 0;
  for (const Region& region : regions_.operands()) {
    const char* actual = reinterpret_cast<const char*>(region.begin);
    size_t bytes = region.end - region.begin, at = 0;
    while (at < bytes && actual[at] == expected[offset + at]) ++at;
    offset += bytes;
    if (at == bytes) continue;
    throw std::runtime_error(
        "emulated GPU: the result depends on the order of threads: " +
        place(region, region.begin + at, 1) +
        " has other bits in another order.\n  kernel: " + kernel_name(launch.kernel) +
        "\n  look for: atomics on floating-point numbers, or a missing barrier.");
  }
}

void Machine::prepare_fibers() {
  threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  if (arena_ == nullptr) arena_ = map(kArenaBytes, 4096);
  if (fibers_.empty()) fibers_.resize(kMaxThreads);
  order_.resize(threads_);
  for (int t = 0; t < threads_; ++t) {
    Fiber& own = fibers_[t];
    if (own.stack == nullptr) own.stack = map(kStackBytes, 4096);
    unsigned number = static_cast<unsigned>(t);
    own.number = t;
    own.warp = t / width;
    own.lane = t % width;
    own.index = {number % launch.block.x, number / launch.block.x % launch.block.y,
                 number / (launch.block.x * launch.block.y)};
    order_[t] = t;
  }
}

void Machine::fiber_main() {
  for (;;) {
    Machine& own = machine();
    running = &own;
    own.launch.invoke(own.launch.call);
    own.settle();
    own.fiber->state = State::kReturned;
    own.pause();
  }
}

void Machine::enter(Fiber& next) {
  if (next.is_started) _longjmp(next.resume, 1);
  next.is_started = true;
  getcontext(&next.start);
  next.start.uc_stack = {next.stack, 0, kStackBytes};
  next.start.uc_link = nullptr;
  makecontext(&next.start, &Machine::fiber_main, 0);
  setcontext(&next.start);
}

// Runs a thread until it waits, returns or is at fault.
void Machine::resume(Fiber& next) {
  fiber = &next;
  if (_setjmp(scheduler_) == 0) enter(next);
  running = nullptr;
}

void Machine::pause() {
  Fiber* own = fiber;
  running = nullptr;
  if (_setjmp(own->resume) == 0) _longjmp(scheduler_, 1);
  running = this;
}

void Machine::wait_at_barrier(Site site) {
  settle();
  fiber->site = site;
  fiber->state = State::kAtBarrier;
  pause();
}

uint64_t Machine::wait_in_collective(Collective kind, uint64_t mask, uint64_t value, int argument,
                                     int shuffle_width, Site site) {
  Unwatched unwatched;
  settle();
  Fiber& own = *fiber;
  own.kind = kind;
  own.mask = mask;
  own.value = value;
  own.argument = argument;
  own.width = shuffle_width == 0 ? width : shuffle_width;
  own.site = site;
  bool is_power = own.width > 0 && (own.width & (own.width - 1)) == 0;
  if (!is_power || own.width > width) {
    fault("a shuffle of width " + std::to_string(own.width) + " in a warp of " +
              std::to_string(width) + " lanes",
          "Widths are powers of two up to the warp; warps have 32 or 64 lanes.", nullptr, site);
  }
  if (mask != kInStep && !(mask >> own.lane & 1)) {
    fault("lane " + std::to_string(own.lane) + " calls a collective whose mask does not name it",
          "A mask of 32 bits names half a warp of 64 lanes.", nullptr, site);
  }
  own.state = State::kAtCollective;
  pause();
  return own.value;
}

void* Machine::shared_variable(const void* key, const char* name, size_t bytes, size_t alignment) {
  Unwatched unwatched;
  for (auto [known, address] : shared_) {
    if (known == key) return address;
  }
  // As aligned as the type asks for, and not more.
  size_t offset = (arena_used_ + kGapBytes + 2 * alignment - 1) / (2 * alignment) * (2 * alignment);
  if (alignment < 16) offset += alignment;
  static_bytes_ += bytes;
  if (static_bytes_ + launch.shared_bytes > kMaxSharedBytes) {
    fault("more shared memory than GPUs grant: " + std::to_string(static_bytes_) +
              " bytes of variables and " + std::to_string(launch.shared_bytes) +
              " dynamic bytes, expected at most 49152 together",
          "A smaller tile, or another way for large sizes.", nullptr);
  }
  arena_used_ = offset + bytes;
  void* address = arena_ + offset;
  auto begin = reinterpret_cast<uintptr_t>(address);
  regions_.add_local({begin, begin + bytes, alignment, Kind::kShared, block_start_, name});
  shared_.emplace_back(key, address);
  return address;
}

void* Machine::dynamic_shared() { return arena_ + kGapBytes; }

// Leaves the kernel where it stands; it holds nothing that would need a destructor.
void Machine::fault(const std::string& what, const std::string& look_for, const void* pc,
                    Site site) {
  running = nullptr;
  if (site.file == nullptr && pc == nullptr) site = fiber->site;  // of an atomic
  std::string at = site.file ? text(site) : emulation::source_of(pc);
  report_ = "emulated GPU: " + what + ".\n  kernel: " + kernel_name(launch.kernel) + "\n  block " +
            text(block) + ", thread " + text(fiber->index) + ", " + std::to_string(width) +
            " lanes per warp" + (at.empty() ? "" : "\n  at: " + at) + "\n  look for: " + look_for;
  _longjmp(scheduler_, 2);
}

}  // namespace apex::emulation
