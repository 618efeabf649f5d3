// The functions of device.h and launch.h.
#include "machine.h"

namespace apex::emulation {

Index thread_index() { return running->fiber->index; }
Index block_index() { return running->block; }
Index block_size() {
  const dim3& size = running->launch.block;
  return {size.x, size.y, size.z};
}
Index grid_size() {
  const dim3& size = running->launch.grid;
  return {size.x, size.y, size.z};
}
int warp_width() { return running->width; }
void block_barrier(Site site) { running->wait_at_barrier(site); }

uint64_t collective(Collective kind, uint64_t mask, uint64_t value, int argument, int width,
                    Site site) {
  return running->wait_in_collective(kind, mask, value, argument, width, site);
}

// The lanes that stand at the same place; whoever has returned or waits elsewhere is not active.
uint64_t active_lanes() {
  return running->wait_in_collective(Collective::kVote, kInStep, 1, 0, 0, {"__activemask", 0});
}

void* shared_variable(const void* key, const char* name, size_t bytes, size_t alignment) {
  return running->shared_variable(key, name, bytes, alignment);
}
void* dynamic_shared() { return running->dynamic_shared(); }

void begin_atomic(const void* address, size_t bytes, Site site) {
  running->fiber->site = site;
  running->access(reinterpret_cast<uintptr_t>(address), bytes, Access::kAtomic, nullptr);
}

void run(const Launch& launch) { machine().run(launch); }

size_t most_parameter_bytes() { return machine().width == 32 ? 32764 : 4096; }

Stream* open_stream() {
  ++machine().open_contexts;
  return reinterpret_cast<Stream*>(&machine());
}
void close_stream() { --machine().open_contexts; }

void add_operand(const void* data, size_t bytes, size_t element_bytes, const std::string& name,
                 Content content) {
  Machine& own = machine();
  uint32_t fresh_since = content == Content::kFresh ? own.interval + 1 : 0;
  own.operands.add(data, {reinterpret_cast<uintptr_t>(data), bytes, element_bytes, fresh_since,
                          own.interval, name});
}
void release_operand(const void* data) { machine().operands.remove(data); }
void check_written(const void* data) { machine().check_written(data); }
void name_operand(const void* data, const std::string& name) {
  machine().operands.name(data, name);
}

}  // namespace apex::emulation
