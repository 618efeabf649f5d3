// Lookup of operands, and the memory of who used which byte.
#include <algorithm>

#include "memory.h"

namespace apex::emulation {

void Regions::set_operands(std::vector<Region> operands) {
  operands_ = std::move(operands);
  std::sort(operands_.begin(), operands_.end(), [](const Region& a, const Region& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  furthest_end_.resize(operands_.size());
  uintptr_t furthest = 0;
  for (size_t i = 0; i < operands_.size(); ++i) {
    furthest_end_[i] = furthest = std::max(furthest, operands_[i].end);
  }
  forget_found();
}

void Regions::add_local(Region region) {
  local_.push_back(std::move(region));
  forget_found();
}

void Regions::remove_local(Kind kind) {
  std::erase_if(local_, [=](const Region& region) { return region.kind == kind; });
  forget_found();
}

void Regions::forget_found() { std::fill(std::begin(found_), std::end(found_), nullptr); }

const Region* Regions::find(uintptr_t address, size_t bytes) const {
  for (const Region* region : found_) {
    if (region != nullptr && region->holds(address, bytes)) return region;
  }
  const Region* result = nullptr;
  for (const Region& region : local_) {
    if (region.holds(address, bytes)) result = &region;
  }
  auto behind =
      std::upper_bound(operands_.begin(), operands_.end(), address,
                       [](uintptr_t at, const Region& region) { return at < region.begin; });
  for (size_t i = behind - operands_.begin(); i-- > 0 && furthest_end_[i] > address;) {
    if (result != nullptr) break;
    if (operands_[i].holds(address, bytes)) result = &operands_[i];
  }
  if (result != nullptr) found_[turn_++ % std::size(found_)] = result;
  return result;
}

const Region* Regions::nearest(uintptr_t address) const {
  const Region* best = nullptr;
  uintptr_t best_distance = 4096;
  for (const std::vector<Region>* regions : {&local_, &operands_}) {
    for (const Region& region : *regions) {
      uintptr_t distance = address < region.begin ? region.begin - address
                           : address < region.end ? 0
                                                  : address - region.end;
      if (distance >= best_distance || region.kind == Kind::kParameters) continue;
      best = &region;
      best_distance = distance;
    }
  }
  return best;
}

Cell* Shadow::page_of(uintptr_t page) {
  std::vector<Cell>& cells = pages_[page];
  if (cells.empty()) cells.resize(kPageBytes);
  return cells.data();
}

void Shadow::trim() {
  if (pages_.size() < kMaxPages) return;
  pages_.clear();
  std::fill(std::begin(recent_), std::end(recent_), Entry{0, nullptr});
}

void Operands::add(const void* key, Entry entry) {
  if (entry.bytes == 0) return;
  changed = true;
  entries_[key] = std::move(entry);
}

void Operands::remove(const void* key) {
  auto found = entries_.find(key);
  if (found == entries_.end()) return;
  const Entry& gone = found->second;
  auto named = names_.find(gone.begin);
  std::string name = gone.name.empty() && named != names_.end() ? named->second : gone.name;
  graveyard_.push_back({gone.begin, gone.begin + gone.bytes, gone.element_bytes, Kind::kOperand, 0,
                        std::move(name)});
  if (graveyard_.size() > 64) graveyard_.erase(graveyard_.begin());
  entries_.erase(found);
  if (entries_.empty()) {  // the op is done
    names_.clear();
    graveyard_.clear();
  }
  changed = true;
}

void Operands::forget_fresh(const void* key) {
  auto found = entries_.find(key);
  if (found == entries_.end()) return;
  found->second.fresh_since = 0;
  changed = true;
}

void Operands::name(const void* data, const std::string& name) {
  changed |= names_.emplace(reinterpret_cast<uintptr_t>(data), name).second;
}

const Operands::Entry* Operands::find(const void* key) const {
  auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

std::vector<Region> Operands::regions() const {
  std::vector<Region> regions;
  for (const auto& [key, entry] : entries_) {
    auto named = names_.find(entry.begin);
    std::string name = entry.name.empty() && named != names_.end() ? named->second : entry.name;
    regions.push_back({entry.begin, entry.begin + entry.bytes, entry.element_bytes, Kind::kOperand,
                       entry.fresh_since, name.empty() ? "an unnamed tensor" : name});
  }
  return regions;
}

const std::string* Operands::released(uintptr_t address, size_t bytes) const {
  for (auto region = graveyard_.rbegin(); region != graveyard_.rend(); ++region) {
    if (region->holds(address, bytes)) return &region->name;
  }
  return nullptr;
}

}  // namespace apex::emulation
