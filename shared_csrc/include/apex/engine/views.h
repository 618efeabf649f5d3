// What a row program reads and writes: one row of an operand, or a vector shared by all rows.
#pragma once

#include "apex/core/divide.h"
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
// twice the width, and run out of registers. Where all operands are bfloat16, words of two elements
// serve better: see pairs_cpu.h.
template <class View>
struct AheadView : View {};

// Numbers that are made by index in the place of an operand, one for each column; see
// Row::generated(). Numbers::fill(first, values) gives those from index `first` on.
template <class Numbers>
struct GeneratedView {
  using storage = float;
  static constexpr bool kRead = true, kWritten = false;
  Numbers numbers;
  uint64_t first;  // index of the number of column 0
  int64_t next_row = 0;

  template <int N, class T>
  APEX_HD void fill(int64_t column, T (&values)[N]) const {
    numbers.fill(first + static_cast<uint64_t>(column), values);
  }
};

template <class Numbers>
APEX_HD GeneratedView<Numbers> generated_view(const Numbers& numbers, int64_t row,
                                              int64_t columns) {
  return {numbers, first_number(row, columns)};
}

template <class View>
inline constexpr bool is_generated_v = false;
template <class Numbers>
inline constexpr bool is_generated_v<GeneratedView<Numbers>> = true;

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
