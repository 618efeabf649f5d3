// What the compiler calls before every access of instrumented code (-fsanitize=thread). This takes
// the place of ThreadSanitizer's own runtime.
#include "machine.h"

#define APEX_HOOK extern "C" __attribute__((visibility("hidden")))

namespace {

using apex::emulation::Access;
using apex::emulation::running;

inline __attribute__((always_inline)) void see(const volatile void* address, size_t bytes,
                                               Access access, const void* pc) {
  if (running == nullptr) return;
  running->access(reinterpret_cast<uintptr_t>(address), bytes, access, pc);
}

}  // namespace

#define APEX_HOOKS(bytes)                                             \
  APEX_HOOK void __tsan_read##bytes(void* address) {                  \
    see(address, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                   \
  APEX_HOOK void __tsan_write##bytes(void* address) {                 \
    see(address, bytes, Access::kWrite, __builtin_return_address(0)); \
  }                                                                   \
  APEX_HOOK void __tsan_volatile_read##bytes(void* address) {         \
    see(address, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                   \
  APEX_HOOK void __tsan_volatile_write##bytes(void* address) {        \
    see(address, bytes, Access::kWrite, __builtin_return_address(0)); \
  }                                                                   \
  APEX_HOOK void __tsan_unaligned_read##bytes(void* address) {        \
    see(address, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                   \
  APEX_HOOK void __tsan_unaligned_write##bytes(void* address) {       \
    see(address, bytes, Access::kWrite, __builtin_return_address(0)); \
  }
APEX_HOOKS(1)
APEX_HOOKS(2)
APEX_HOOKS(4)
APEX_HOOKS(8)
APEX_HOOKS(16)

APEX_HOOK void __tsan_init() {}
APEX_HOOK void __tsan_func_entry(void*) {}
APEX_HOOK void __tsan_func_exit() {}
APEX_HOOK void __tsan_vptr_update(void** address, void*) {
  see(address, sizeof(void*), Access::kWrite, __builtin_return_address(0));
}
APEX_HOOK void __tsan_vptr_read(void** address) {
  see(address, sizeof(void*), Access::kRead, __builtin_return_address(0));
}
APEX_HOOK void __tsan_read_range(void* address, size_t bytes) {
  see(address, bytes, Access::kRead, __builtin_return_address(0));
}
APEX_HOOK void __tsan_write_range(void* address, size_t bytes) {
  see(address, bytes, Access::kWrite, __builtin_return_address(0));
}

// Calls that the compiler does not turn into loads and stores; the linker's --wrap leads them here.
extern "C" {
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
}

APEX_HOOK void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  see(from, bytes, Access::kRead, __builtin_return_address(0));
  see(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
APEX_HOOK void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  see(from, bytes, Access::kRead, __builtin_return_address(0));
  see(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memmove(to, from, bytes);
}
APEX_HOOK void* __wrap_memset(void* to, int value, size_t bytes) {
  see(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}

// Atomics of <atomic>: mostly those of the op's host code.
#define APEX_ATOMIC_UPDATE(bits, type, name, builtin)                               \
  APEX_HOOK type __tsan_atomic##bits##_##name(volatile type* at, type value, int) { \
    see(at, sizeof(type), Access::kAtomic, __builtin_return_address(0));            \
    return builtin(at, value, __ATOMIC_SEQ_CST);                                    \
  }
#define APEX_ATOMIC_EXCHANGE(bits, type, name)                                                     \
  APEX_HOOK int __tsan_atomic##bits##_##name(volatile type* at, type* expected, type desired, int, \
                                             int) {                                                \
    see(at, sizeof(type), Access::kAtomic, __builtin_return_address(0));                           \
    return __atomic_compare_exchange_n(at, expected, desired, false, __ATOMIC_SEQ_CST,             \
                                       __ATOMIC_SEQ_CST);                                          \
  }
#define APEX_ATOMICS(bits, type)                                                   \
  APEX_HOOK type __tsan_atomic##bits##_load(const volatile type* at, int) {        \
    see(at, sizeof(type), Access::kAtomic, __builtin_return_address(0));           \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                  \
  }                                                                                \
  APEX_HOOK void __tsan_atomic##bits##_store(volatile type* at, type value, int) { \
    see(at, sizeof(type), Access::kAtomic, __builtin_return_address(0));           \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                 \
  }                                                                                \
  APEX_ATOMIC_UPDATE(bits, type, exchange, __atomic_exchange_n)                    \
  APEX_ATOMIC_UPDATE(bits, type, fetch_add, __atomic_fetch_add)                    \
  APEX_ATOMIC_UPDATE(bits, type, fetch_sub, __atomic_fetch_sub)                    \
  APEX_ATOMIC_UPDATE(bits, type, fetch_and, __atomic_fetch_and)                    \
  APEX_ATOMIC_UPDATE(bits, type, fetch_or, __atomic_fetch_or)                      \
  APEX_ATOMIC_UPDATE(bits, type, fetch_xor, __atomic_fetch_xor)                    \
  APEX_ATOMIC_UPDATE(bits, type, fetch_nand, __atomic_fetch_nand)                  \
  APEX_ATOMIC_EXCHANGE(bits, type, compare_exchange_strong)                        \
  APEX_ATOMIC_EXCHANGE(bits, type, compare_exchange_weak)
APEX_ATOMICS(8, uint8_t)
APEX_ATOMICS(16, uint16_t)
APEX_ATOMICS(32, uint32_t)
APEX_ATOMICS(64, uint64_t)

APEX_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
APEX_HOOK void __tsan_atomic_signal_fence(int) {}
