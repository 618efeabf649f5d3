// Counts of loads and stores, see counts.h.
#include <algorithm>
#include <tuple>

#include "counts.h"

namespace apex::emulation {
namespace {

constexpr uintptr_t kSectorBytes = 32;

}  // namespace

void Counts::see(int thread, int warp, const void* place, uintptr_t address, size_t bytes,
                 bool is_store) {
  if (visits_.size() <= static_cast<size_t>(thread)) visits_.resize(thread + 1);
  std::vector<Visits>& own = visits_[thread];
  if (own.empty()) ++threads;
  auto known = std::find_if(own.begin(), own.end(),
                            [=](const Visits& visits) { return visits.place == place; });
  if (known == own.end()) known = own.insert(own.end(), {place, 0});
  uint64_t group = 2 * static_cast<uint64_t>(warp) + (is_store ? 1 : 0);
  seen_.push_back({group, place, known->times++, static_cast<uint32_t>(bytes), address});
  ++of(is_store).accesses;
  of(is_store).bytes += bytes;
}

void Counts::end_block() {
  auto access = [](const Seen& seen) { return std::tie(seen.group, seen.place, seen.time); };
  std::sort(seen_.begin(), seen_.end(), [&](const Seen& a, const Seen& b) {
    return std::tuple_cat(access(a), std::tie(a.address)) <
           std::tuple_cat(access(b), std::tie(b.address));
  });
  for (size_t first = 0; first < seen_.size();) {
    Traffic& traffic = of(seen_[first].group % 2 != 0);
    uintptr_t end = 0, end_of_sectors = 0;
    uint64_t bytes = 0;
    size_t next = first;
    for (; next < seen_.size() && access(seen_[next]) == access(seen_[first]); ++next) {
      uintptr_t from = std::max(seen_[next].address, end);
      uintptr_t to = std::max(seen_[next].address + seen_[next].bytes, end);
      bytes += to - from;
      end = to;
      uintptr_t sector = std::max(seen_[next].address / kSectorBytes, end_of_sectors);
      uintptr_t behind = std::max((end - 1) / kSectorBytes + 1, end_of_sectors);
      traffic.sectors += behind - sector;
      end_of_sectors = behind;
    }
    traffic.needed += (bytes + kSectorBytes - 1) / kSectorBytes;
    first = next;
  }
  seen_.clear();
  for (std::vector<Visits>& own : visits_) own.clear();
}

}  // namespace apex::emulation
