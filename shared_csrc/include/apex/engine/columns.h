// Operands of the engines: how each is stored, whether it is read, and whether it is written.
#pragma once

#include <vector>

#include "apex/core/pack.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class S>
struct In {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
};
template <class S>
struct Out {
  using storage = S;
  static constexpr bool kRead = false, kWritten = true;
};
template <class S>
struct InOut {
  using storage = S;
  static constexpr bool kRead = true, kWritten = true;
};

// Tensor lists as raw memory: `columns` pointers and one element count per tensor.
struct TensorTable {
  int columns = 0;
  std::vector<void*> data;     // [tensors, columns]
  std::vector<int64_t> numel;  // [tensors]; tensors without elements are left out

  int64_t tensors() const { return static_cast<int64_t>(numel.size()); }
  void* const* row(int64_t tensor) const { return data.data() + tensor * columns; }
};

// A functor whose hyper-parameters live on the device turns itself into one of plain numbers with
// prepare(), and may ask with skip() that nothing is done.
template <class F>
APEX_HD auto prepared(const F& functor) {
  if constexpr (requires { functor.prepare(); }) {
    return functor.prepare();
  } else {
    return functor;
  }
}

template <class F>
APEX_HD bool skipped(const F& functor) {
  if constexpr (requires { functor.skip(); }) {
    return functor.skip();
  } else {
    return false;
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
