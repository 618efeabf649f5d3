// What a row program reads and writes: one row of an operand, or a vector shared by all rows.
#pragma once

#include "apex/core/pack.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class S>
struct ReadView {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
  const S* data;         // [columns]
  int64_t next_row = 0;  // elements to the next row, which the CPU prefetches
};

// A vector that all rows share: in the cache after the first of them.
template <class S>
struct SharedView : ReadView<S> {};

template <class S>
struct WriteView {
  using storage = S;
  static constexpr bool kRead = false, kWritten = true;
  S* data;  // [columns]
  int64_t next_row = 0;
  bool streamed = false;  // on the CPU, written around the cache; `data` is aligned for that
};

// A view whose packs the CPU converts ahead of the loop over lanes instead of within it. That pays
// where the functor is long, as with an exp: loops that touch 16-bit elements are vectorized at
// twice the width, and run out of registers.
template <class View>
struct AheadView : View {};

template <class View>
inline constexpr bool is_shared_v = false;
template <class S>
inline constexpr bool is_shared_v<SharedView<S>> = true;
template <class View>
inline constexpr bool is_shared_v<AheadView<View>> = is_shared_v<View>;

template <class View>
inline constexpr bool is_ahead_v = false;
template <class View>
inline constexpr bool is_ahead_v<AheadView<View>> = true;

}  // namespace APEX_BACKEND_NS
}  // namespace apex
