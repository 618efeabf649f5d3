// From a run-time dtype to a storage type of core/types.h.
#pragma once

#include "apex/core/storage.h"
#include "apex/torch/check.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Calls body.template operator()<S>() with the storage type of `dtype`.
template <class Body>
void dispatch_floating(const char* op, ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Double:
      return body.template operator()<double>();
    case ScalarType::Float:
      return body.template operator()<float>();
    case ScalarType::Half:
      return body.template operator()<Half>();
    case ScalarType::BFloat16:
      return body.template operator()<BFloat16>();
    default:
      fail(op, ": expected float64, float32, float16 or bfloat16, got ", dtype_name(dtype), ".");
  }
}

// A run-time bool as a compile-time one: body.template operator()<true or false>().
template <class Body>
void dispatch_bool(bool value, Body&& body) {
  if (value) {
    body.template operator()<true>();
  } else {
    body.template operator()<false>();
  }
}

template <class S>
constexpr ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<S, double>) return ScalarType::Double;
  if constexpr (std::is_same_v<S, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<S, Half>) return ScalarType::Half;
  if constexpr (std::is_same_v<S, BFloat16>) return ScalarType::BFloat16;
  if constexpr (std::is_same_v<S, int>) return ScalarType::Int;
  return ScalarType::Long;
}

// The same for operands whose storage type kernels ask for as they run.
inline Storage storage_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Storage::kFloat;
    case ScalarType::Half:
      return Storage::kHalf;
    case ScalarType::BFloat16:
      return Storage::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return Storage::kFloat8;
    default:
      return Storage::kOther;
  }
}

// What statistics of x are kept in, such as means: the type that x is computed in.
inline ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Memory of an operand of any dtype. A tool that watches memory calls it by the operand's name.
inline void* operand(const Tensor& tensor, const char* name) {
  void* data = memory_of(tensor, name);
#if defined(APEX_NAME_OPERAND)
  APEX_NAME_OPERAND(data, name);
#endif
  return data;
}

// Memory of `tensor` as elements of S, after a check that it holds those.
template <class S>
S* data(const Tensor& tensor, const char* name) {
  check(tensor.scalar_type() == scalar_type_of<S>(), name, " must be ",
        dtype_name(scalar_type_of<S>()), ", got ", dtype_name(tensor.scalar_type()), ".");
  return static_cast<S*>(operand(tensor, name));
}

// Memory of a mask: bool, or uint8 where anything but 0 is true.
inline const uint8_t* mask_data(const Tensor& mask, const char* name) {
  check(mask.scalar_type() == ScalarType::Bool || mask.scalar_type() == ScalarType::Byte, name,
        " must be bool or uint8, got ", dtype_name(mask.scalar_type()), ".");
  return static_cast<const uint8_t*>(operand(mask, name));
}

// Memory of a tensor that holds one number of type S on the device of `like`: a flag, a learning
// rate.
template <class S>
S* number_near(const char* op, const char* name, const Tensor& number, const Tensor& like) {
  check_tensors(op, {{name, number}});
  bool is_near =
      number.is_cpu() == like.is_cpu() && number.get_device_index() == like.get_device_index();
  if (number.numel() != 1 || number.scalar_type() != scalar_type_of<S>() || !is_near) {
    fail(op, ": ", name, " must be one ", dtype_name(scalar_type_of<S>()),
         " number on the device of the tensors (", describe(like), "), got ", describe(number),
         ".");
  }
  return static_cast<S*>(operand(number, name));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
