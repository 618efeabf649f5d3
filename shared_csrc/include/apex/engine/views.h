// What a row program reads and writes: one row of an operand, or a vector shared by all rows.
#pragma once

#include "apex/core/pack.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class S>
struct ReadView {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
  const S* data;  // [columns]
};

template <class S>
struct WriteView {
  using storage = S;
  static constexpr bool kRead = false, kWritten = true;
  S* data;  // [columns]
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
