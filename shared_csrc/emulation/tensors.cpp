// Learns of an op's tensors: the linker's --wrap leads the op's calls of LibTorch's C interface
// here.
#include <string_view>

#include "machine.h"

// LibTorch's stable C interface, as far as it tells of memory.
struct AtenTensorOpaque;
using Handle = AtenTensorOpaque*;
using Error = int32_t;

#define APEX_WRAPPED(name, parameters)                                              \
  extern "C" __attribute__((visibility("default"))) Error __real_##name parameters; \
  extern "C" __attribute__((visibility("hidden"))) Error __wrap_##name parameters

#pragma GCC visibility push(default)
extern "C" {
Error aoti_torch_get_numel(Handle, int64_t*);
Error aoti_torch_get_dim(Handle, int64_t*);
Error aoti_torch_get_sizes(Handle, int64_t**);
Error aoti_torch_get_strides(Handle, int64_t**);
Error aoti_torch_get_dtype(Handle, int32_t*);
size_t aoti_torch_dtype_element_size(int32_t);
}

extern "C" Error __real_aoti_torch_get_data_ptr(Handle, void**);
#pragma GCC visibility pop

namespace {

using apex::emulation::machine;

// Handles of tensors that the op made itself, and since when; and handles that stand for others.
struct Made {
  uint32_t since;
};
std::unordered_map<Handle, Made>& made() {
  thread_local auto* handles = new std::unordered_map<Handle, Made>;
  return *handles;
}
std::unordered_map<Handle, Handle>& aliases() {
  thread_local auto* handles = new std::unordered_map<Handle, Handle>;
  return *handles;
}

// From the first to the last element, in bytes.
size_t extent_of(Handle tensor, size_t element_bytes) {
  int64_t numel = 0, dim = 0, *sizes = nullptr, *strides = nullptr;
  aoti_torch_get_numel(tensor, &numel);
  if (numel == 0) return 0;
  aoti_torch_get_dim(tensor, &dim);
  aoti_torch_get_sizes(tensor, &sizes);
  aoti_torch_get_strides(tensor, &strides);
  int64_t last = 0;
  for (int64_t d = 0; d < dim; ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * element_bytes;
}

// The handle under which a tensor is known: that for which a temporary one stands. Torch frees
// handles that it is given, and may make others at the same address.
Handle known_as(Handle tensor, const void* data) {
  auto alias = aliases().find(tensor);
  if (alias == aliases().end()) return tensor;
  void* own = nullptr;
  __real_aoti_torch_get_data_ptr(alias->second, &own);
  if (own == data) return alias->second;
  aliases().erase(alias);
  return tensor;
}

void learn(Handle tensor, const void* data) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor, &dtype);
  size_t element_bytes = aoti_torch_dtype_element_size(dtype);
  auto own = made().find(tensor);
  uint32_t since = own == made().end() ? 0 : own->second.since;
  machine().operands.add(known_as(tensor, data),
                         {reinterpret_cast<uintptr_t>(data), extent_of(tensor, element_bytes),
                          element_bytes, since, machine().interval, ""});
}

Error remember(Error error, Handle tensor) {
  if (error != 0) return error;
  aliases().erase(tensor);
  made()[tensor] = {machine().interval + 1};
  return error;
}

void forget_fresh() {
  for (auto& [handle, own] : made()) {
    own.since = 0;
    machine().operands.forget_fresh(handle);
  }
}

}  // namespace

APEX_WRAPPED(aoti_torch_get_data_ptr, (Handle tensor, void** data)) {
  Error error = __real_aoti_torch_get_data_ptr(tensor, data);
  if (error == 0) learn(tensor, *data);
  return error;
}
APEX_WRAPPED(torch_get_mutable_data_ptr, (Handle tensor, void** data)) {
  Error error = __real_torch_get_mutable_data_ptr(tensor, data);
  if (error == 0) learn(tensor, *data);
  return error;
}
APEX_WRAPPED(torch_get_const_data_ptr, (Handle tensor, const void** data)) {
  Error error = __real_torch_get_const_data_ptr(tensor, data);
  if (error == 0) learn(tensor, *data);
  return error;
}

APEX_WRAPPED(aoti_torch_aten_new_empty,
             (Handle self, const int64_t* size, int64_t dim, int32_t* dtype, int32_t* layout,
              int32_t* device, int32_t index, int32_t* pin, Handle* result)) {
  Error error =
      __real_aoti_torch_aten_new_empty(self, size, dim, dtype, layout, device, index, pin, result);
  return remember(error, *result);
}
APEX_WRAPPED(aoti_torch_empty_strided,
             (int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
              int32_t device, int32_t index, Handle* result)) {
  machine().count_allocation();
  Error error = __real_aoti_torch_empty_strided(dim, sizes, strides, dtype, device, index, result);
  return remember(error, *result);
}

// Another handle on a tensor: an element of a list, or a result that is handed to torch, for which
// all must have been written.
APEX_WRAPPED(aoti_torch_new_tensor_handle, (Handle tensor, Handle* result)) {
  if (made().count(tensor)) machine().check_written(tensor);
  Error error = __real_aoti_torch_new_tensor_handle(tensor, result);
  if (error == 0) aliases()[*result] = tensor;
  return error;
}

APEX_WRAPPED(aoti_torch_delete_tensor_object, (Handle tensor)) {
  machine().operands.remove(tensor);
  made().erase(tensor);
  aliases().erase(tensor);
  std::erase_if(aliases(), [=](const auto& alias) { return alias.second == tensor; });
  return __real_aoti_torch_delete_tensor_object(tensor);
}

// Torch's own operators may write to what the op has made.
APEX_WRAPPED(aoti_torch_copy_, (Handle self, Handle source, int32_t non_blocking)) {
  Error error = __real_aoti_torch_copy_(self, source, non_blocking);
  if (auto own = made().find(self); own != made().end()) own->second.since = 0;
  machine().operands.forget_fresh(self);
  return error;
}
APEX_WRAPPED(torch_call_dispatcher,
             (const char* name, const char* overload, uint64_t* stack, uint64_t version)) {
  std::string_view op = name;
  bool makes = op == "aten::new_empty" || op == "aten::empty_like";
  if (op.ends_with('_')) forget_fresh();
  Error error = __real_torch_call_dispatcher(name, overload, stack, version);
  return makes ? remember(error, reinterpret_cast<Handle>(stack[0])) : error;
}
APEX_WRAPPED(aoti_torch_call_dispatcher,
             (const char* name, const char* overload, uint64_t* stack)) {
  if (std::string_view(name).ends_with('_')) forget_fresh();
  return __real_aoti_torch_call_dispatcher(name, overload, stack);
}
