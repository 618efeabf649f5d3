// Operands of the engines: how each is stored, whether it is read, and whether it is written.
#pragma once

#include "apex/core/pack.h"
#include "apex/core/table.h"

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
