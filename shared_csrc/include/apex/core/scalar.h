// A hyper-parameter that is a number, or lives in device memory so that a CUDA graph can change it.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
struct Scalar {
  T number;
  const T* pointer;  // read instead of `number` when not null; valid on the functor's device

  APEX_HD T value() const { return pointer ? *pointer : number; }
};

template <class T>
Scalar<T> scalar(T number) {
  return {number, nullptr};
}

template <class T>
Scalar<T> scalar(const T* pointer) {
  return {T(0), pointer};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
