// The order in which threads run, and what happens where they wait for each other.
#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "machine.h"

namespace apex::emulation {
namespace {

uint64_t next_random(uint64_t& state) {  // xorshift64*, Vigna 2016
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull;
}

const char* name_of(const Fiber& lane) {
  static const char* const masked[] = {"__syncwarp",     "__shfl_sync",      "__shfl_xor_sync",
                                       "__shfl_up_sync", "__shfl_down_sync", "a vote"};
  static const char* const in_step[] = {"a wave barrier", "__shfl",      "__shfl_xor",
                                        "__shfl_up",      "__shfl_down", "a vote"};
  return (lane.mask == kInStep ? in_step : masked)[static_cast<int>(lane.kind)];
}

bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && std::string_view(a.file) == b.file;
}

}  // namespace

// Every block once; with a seed, in another order.
uint64_t Machine::block_at(uint64_t step) const {
  uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  return seed_ % 2 == 0 ? step : blocks - 1 - step;
}

void Machine::shuffle_threads(uint64_t salt) {
  if (seed_ == 0) return;
  uint64_t state = (seed_ * 0x9e3779b97f4a7c15ull) ^ (salt * 0xbf58476d1ce4e5b9ull) ^ launches_;
  if (state == 0) state = 1;
  for (size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1], order_[next_random(state) % i]);
  }
}

// A block with shared memory of its own, all threads ready.
void Machine::begin_block(uint64_t number) {
  block = {static_cast<unsigned>(number % launch.grid.x),
           static_cast<unsigned>(number / launch.grid.x % launch.grid.y),
           static_cast<unsigned>(number / launch.grid.x / launch.grid.y)};
  block_start_ = ++interval;
  std::fill(std::begin(turns_), std::end(turns_), 0);
  shared_.clear();
  regions_.remove_local(Kind::kShared);
  arena_used_ = kGapBytes + launch.shared_bytes;
  static_bytes_ = 0;
  if (launch.shared_bytes > 0) {
    auto begin = reinterpret_cast<uintptr_t>(dynamic_shared());
    regions_.add_local({begin, begin + launch.shared_bytes, 1, Kind::kShared, block_start_,
                        "dynamic shared memory"});
  }
  for (int t = 0; t < threads_; ++t) fibers_[t].state = State::kReady;
  shuffle_threads(interval);
}

void Machine::run_block(uint64_t number) {
  begin_block(number);
  for (;;) {
    for (int t : order_) {
      if (fibers_[t].state != State::kReady) continue;
      report_.clear();
      resume(fibers_[t]);
      if (!report_.empty()) abandon();
    }
    bool all_returned = std::all_of(fibers_.begin(), fibers_.begin() + threads_,
                                    [](Fiber& own) { return own.state == State::kReturned; });
    if (all_returned) break;
    if (resolve_collectives(/*is_stuck=*/false)) continue;
    resolve_collectives(/*is_stuck=*/true);  // raises if a lane waits for one that never comes
    release_barrier();
  }
  if (counts_.is_on()) counts_.end_block();
}

// Raises what was reported. Kernels hold nothing that would need a destructor: their stacks are
// used again as they are.
void Machine::abandon() {
  for (Fiber& own : fibers_) own.is_started = false;
  overwrite_.bytes = 0;
  throw std::runtime_error(report_);
}

Fiber* Machine::lane_of(int warp, int lane) {
  int number = warp * width + lane;
  return number < threads_ ? &fibers_[number] : nullptr;
}

// Lets lanes go on whose collective is complete; whether there were any.
bool Machine::resolve_collectives(bool is_stuck) {
  bool resolved = false;
  for (int warp = 0; warp * width < threads_; ++warp) {
    for (int lane = 0; lane < width; ++lane) {
      Fiber* own = lane_of(warp, lane);
      if (own == nullptr || own->state != State::kAtCollective) continue;
      resolved |= own->mask == kInStep ? resolve_in_step(warp, is_stuck)
                                       : resolve_masked(warp, *own, is_stuck);
    }
  }
  return resolved;
}

// CUDA: all lanes that the mask names call the same collective with the same mask.
bool Machine::resolve_masked(int warp, Fiber& first, bool is_stuck) {
  std::vector<Fiber*> lanes;
  for (int lane = 0; lane < width; ++lane) {
    if (!(first.mask >> lane & 1)) continue;
    Fiber* own = lane_of(warp, lane);
    bool is_here = own != nullptr && own->state == State::kAtCollective &&
                   own->kind == first.kind && own->mask == first.mask;
    if (is_here) {
      lanes.push_back(own);
    } else if (is_stuck) {
      fault_in(first,
               std::string(name_of(first)) + ": the mask names lane " + std::to_string(lane) +
                   ", which does not take part: " + describe(own),
               "A mask must name the lanes that call, no others; do all lanes get here?");
    } else {
      return false;
    }
  }
  execute(lanes);
  return true;
}

// HIP: the lanes that are at the same place run in step. Of several places, those go on first whose
// lanes read from each other alone: elsewhere others may join before.
bool Machine::resolve_in_step(int warp, bool is_stuck) {
  bool resolved = false;
  std::vector<Fiber*> waiting;
  for (int lane = 0; lane < width; ++lane) {
    Fiber* own = lane_of(warp, lane);
    if (own && own->state == State::kAtCollective && own->mask == kInStep) waiting.push_back(own);
  }
  while (!waiting.empty()) {
    Fiber& first = *waiting.front();
    std::vector<Fiber*> lanes;
    for (Fiber* own : waiting) {
      if (own->kind == first.kind && same_site(own->site, first.site)) lanes.push_back(own);
    }
    std::erase_if(waiting, [&](Fiber* own) {
      return std::find(lanes.begin(), lanes.end(), own) != lanes.end();
    });
    for (Fiber* own : lanes) {
      Fiber* source = first.kind == Collective::kVote ? own : lane_of(warp, source_of(*own));
      if (std::find(lanes.begin(), lanes.end(), source) != lanes.end()) continue;
      if (is_stuck) {
        fault_in(*own,
                 std::string(name_of(*own)) + " reads from lane " +
                     std::to_string(source_of(*own)) +
                     ", which does not take part: " + describe(source),
                 "Lanes that are not active give no value; do all lanes get here?");
      }
      lanes.clear();
      break;
    }
    if (lanes.empty()) continue;
    execute(lanes);
    resolved = true;
  }
  return resolved;
}

int Machine::source_of(const Fiber& lane) const {
  int first = lane.lane & ~(lane.width - 1), own = lane.lane, behind = first + lane.width;
  int source = own;
  if (lane.kind == Collective::kShuffleTo) source = first + (lane.argument & (lane.width - 1));
  if (lane.kind == Collective::kShuffleXor) source = own ^ lane.argument;
  if (lane.kind == Collective::kShuffleUp) source = own - lane.argument;
  if (lane.kind == Collective::kShuffleDown) source = own + lane.argument;
  bool is_below = source < (lane.kind == Collective::kShuffleXor ? 0 : first);
  return is_below || source >= behind ? own : source;
}

void Machine::execute(const std::vector<Fiber*>& lanes) {
  Fiber& first = *lanes.front();
  uint64_t present = 0, votes = 0;
  std::vector<uint64_t> values(width);
  for (Fiber* own : lanes) {
    present |= uint64_t{1} << own->lane;
    votes |= uint64_t{own->value != 0} << own->lane;
    values[own->lane] = own->value;
    if (own->width == first.width) continue;
    fault_in(*own,
             std::string(name_of(*own)) + ": lanes " + std::to_string(own->lane) + " and " +
                 std::to_string(first.lane) + " give the widths " + std::to_string(own->width) +
                 " and " + std::to_string(first.width),
             "The width must be the same in all lanes.");
  }
  for (Fiber* own : lanes) {
    own->state = State::kReady;
    if (first.kind == Collective::kVote) {
      own->value = votes;
    } else if (first.kind != Collective::kSync) {
      int source = source_of(*own);
      if (!(present >> source & 1)) {
        fault_in(*own,
                 std::string(name_of(*own)) + " reads from lane " + std::to_string(source) +
                     ", which does not take part: " + describe(lane_of(own->warp, source)),
                 "A lane may read only from lanes that its mask names.");
      }
      own->value = values[source];
    }
  }
  // Shuffles and votes order no memory (CUDA C++ Programming Guide, warp shuffle functions).
  if (first.kind == Collective::kSync) ++turns_[first.warp];
}

void Machine::release_barrier() {
  Fiber* first = nullptr;
  for (int t = 0; t < threads_; ++t) {
    if (fibers_[t].state == State::kAtBarrier) first = first ? first : &fibers_[t];
  }
  for (int t = 0; t < threads_; ++t) {
    Fiber& own = fibers_[t];
    if (own.state == State::kAtBarrier && same_site(own.site, first->site)) continue;
    fault_in(*first,
             "divergent barrier: this thread waits at __syncthreads(), thread " + text(own.index) +
                 " does not: " + describe(&own),
             "All threads of a block must reach the same barrier; returning early counts, too.");
  }
  ++interval;
  for (int t = 0; t < threads_; ++t) fibers_[t].state = State::kReady;
  shuffle_threads(interval);
}

std::string Machine::describe(const Fiber* lane) const {
  if (lane == nullptr) return "the block has no such thread";
  std::string at = text(lane->site);
  switch (lane->state) {
    case State::kReturned:
      return "it has returned";
    case State::kAtBarrier:
      return "it waits at the __syncthreads() of " + at;
    case State::kAtCollective:
      return std::string("it waits in ") + name_of(*lane) + " of " + at;
    default:
      return "it runs elsewhere";
  }
}

// A fault that the scheduler finds: no fiber is left, but all are abandoned.
void Machine::fault_in(Fiber& lane, const std::string& what, const std::string& look_for) {
  fiber = &lane;
  if (_setjmp(scheduler_) == 0) fault(what, look_for, nullptr, lane.site);
  abandon();
}

}  // namespace apex::emulation
