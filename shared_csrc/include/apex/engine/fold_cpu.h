// Reductions of several numbers at once on the CPU, such as a running maximum with a sum beside it.
#pragma once

#include <algorithm>

#include "apex/engine/lanes_cpu.h"
#include "apex/engine/tails_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Columns added into one set of lanes before these are merged: bounds the error.
inline constexpr int64_t kFoldSpan = 256 * kPack;

// One state of N numbers per lane.
template <class T, int N>
struct FoldLanes {
  alignas(64) T numbers[N][kPack];

  explicit FoldLanes(const Array<T, N>& empty) {
    for (int n = 0; n < N; ++n) std::fill(numbers[n], numbers[n] + kPack, empty[n]);
  }
  APEX_HD Array<T, N> get(int lane) const {
    Array<T, N> state;
    for (int n = 0; n < N; ++n) state[n] = numbers[n][lane];
    return state;
  }
  APEX_HD void set(int lane, const Array<T, N>& state) {
    for (int n = 0; n < N; ++n) numbers[n][lane] = state[n];
  }

  template <class F, class... Values>
  APEX_HD void add(const F& functor, int lane, Values&... values) {
    Array<T, N> state = get(lane);
    functor(state, values...);
    set(lane, state);
  }

  // The state of the first `count` lanes together; the others must be empty. Widths are constants,
  // so that the narrow ones are vector operations, too.
  template <int kWidth, class Merge>
  APEX_HD void merge_down(const Merge& merge, int64_t count) {
    if constexpr (kWidth > 0) {
      if (count > kWidth) {
        APEX_VECTORIZE_FEW
        for (int lane = 0; lane < kWidth; ++lane) set(lane, merge(get(lane), get(lane + kWidth)));
      }
      merge_down<kWidth / 2>(merge, count);
    }
  }
};

// The state of columns [begin, end).
template <int N, class T, class F, class Merge, class... Views>
Array<T, N> fold_span(int64_t begin, int64_t end, const Array<T, N>& empty, const F& functor,
                      const Merge& merge, const Views&... views) {
  FoldLanes<T, N> lanes(empty);
  Lanes<T, Views...> pack(views...);
  int64_t column = begin;
  for (; column + kPack <= end; column += kPack) {
    pack.at(column);
    pack.each([&](int slot, auto&... values) { lanes.add(functor, slot, values...); });
  }
  if (int count = static_cast<int>(end - column); count > 0) {
    auto body = [&](const TailLane& lane, auto&... values) {
      const Array<T, N> before = lanes.get(lane.slot);
      Array<T, N> state = before;
      functor(state, values...);
      for (int n = 0; n < N; ++n) state[n] = lane.is_present ? state[n] : before[n];
      lanes.set(lane.slot, state);
    };
    each_in_order<T>(column, count, body, views...);
  }
  lanes.template merge_down<kPack / 2>(merge, end - begin);
  return lanes.get(0);
}

// The state of all columns; Row::fold() says what the arguments are.
template <int N, class T, class F, class Merge, class... Views>
Array<T, N> fold_columns(int64_t columns, const Array<T, N>& empty, const F& functor,
                         const Merge& merge, const Views&... views) {
  int64_t end = std::min(columns, kFoldSpan);
  Array<T, N> state = fold_span(0, end, empty, functor, merge, views...);
  while (end < columns) {
    int64_t begin = end;
    end = std::min(columns, begin + kFoldSpan);
    state = merge(state, fold_span(begin, end, empty, functor, merge, views...));
  }
  return state;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
