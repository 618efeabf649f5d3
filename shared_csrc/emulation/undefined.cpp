// What the compiler calls where an operation is undefined (-fsanitize=signed-integer-overflow and
// others). Takes the place of UBSan's own runtime, so that reports name block and thread.
#include <stdexcept>

#include "machine.h"

namespace {

// The beginning of every handler's first argument.
struct Place {
  const char* file;
  uint32_t line, column;
};

void report(const void* data, const char* what, const char* look_for, const void* pc) {
  const Place& place = *static_cast<const Place*>(data);
  apex::emulation::Machine* machine = apex::emulation::running;
  apex::emulation::Unwatched unwatched;
  if (machine != nullptr) {
    machine->fault(what, look_for, pc, {place.file, static_cast<int>(place.line)});
  }
  throw std::runtime_error(std::string("emulated GPU: ") + what + " in host code at " +
                           (place.file ? place.file : "?") + ":" + std::to_string(place.line));
}

// Of type_mismatch_v1: the type's description follows the place.
struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment;
  unsigned char kind;
};

}  // namespace

#define APEX_HANDLER(name, parameters, what, look_for)                                     \
  extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_##name parameters { \
    report(data, what, look_for, __builtin_return_address(0));                             \
  }

#define APEX_INDEX "An index or a product that needs int64_t."
APEX_HANDLER(add_overflow, (void* data, void*, void*), "integer overflow in an addition",
             APEX_INDEX)
APEX_HANDLER(sub_overflow, (void* data, void*, void*), "integer overflow in a subtraction",
             APEX_INDEX)
APEX_HANDLER(mul_overflow, (void* data, void*, void*), "integer overflow in a multiplication",
             APEX_INDEX)
APEX_HANDLER(negate_overflow, (void* data, void*), "integer overflow in a negation", APEX_INDEX)
APEX_HANDLER(divrem_overflow, (void* data, void*, void*), "division by zero, or overflow of one",
             "A size that may be zero.")
APEX_HANDLER(shift_out_of_bounds, (void* data, void*, void*), "shift by more bits than there are",
             "Masks of lanes have up to 64 bits.")
APEX_HANDLER(out_of_bounds, (void* data, void*), "index beyond the end of an array",
             "A loop over a local or shared array that runs too far.")
APEX_HANDLER(float_cast_overflow, (void* data, void*), "conversion of a number out of range",
             "Infinities and NaN have no integer value.")
APEX_HANDLER(load_invalid_value, (void* data, void*), "a bool or enum that holds no such value",
             "Memory that nothing was written to.")
APEX_HANDLER(builtin_unreachable, (void* data), "reached what is marked unreachable",
             "A case that is missing.")
APEX_HANDLER(missing_return, (void* data), "end of a function without a result",
             "A case that is missing.")
APEX_HANDLER(vla_bound_not_positive, (void* data, void*), "array of no elements", "A size of zero.")

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(
    void* data, void* address) {
  const auto& mismatch = *static_cast<const TypeMismatch*>(data);
  uintptr_t alignment = uintptr_t{1} << mismatch.log_alignment;
  bool is_misaligned = reinterpret_cast<uintptr_t>(address) % alignment != 0;
  const char* what = "access through a null pointer";
  if (is_misaligned) what = "misaligned access: the address is no multiple of the type's alignment";
  if (is_misaligned && alignment == 16) {
    what = "misaligned vector access: the address is no multiple of 16 bytes";
  }
  report(data, what, "Vectors need is_aligned() of every operand, or a path of single elements.",
         __builtin_return_address(0));
}
