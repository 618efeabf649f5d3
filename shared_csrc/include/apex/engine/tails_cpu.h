// The end of a row on the CPU, less than a pack, as groups of lanes for vectorized loops.
#pragma once

#include <utility>

#include "apex/core/pack.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T, class View>
APEX_HD void load_lanes(const View& view, int64_t column, int count, T (&values)[kGroup]) {
  if constexpr (is_generated_v<View>) {
    view.fill(column, values);
  } else if constexpr (View::kRead) {
    load_group(view.data + column, values, count);
  } else {
    for (int lane = 0; lane < kGroup; ++lane) values[lane] = T(0);
  }
}

template <class T, class View>
APEX_HD void store_lanes(const View& view, int64_t column, int count, const T (&values)[kGroup]) {
  if constexpr (View::kWritten) store_group(view.data + column, values, count);
}

template <class T, size_t... I, class Body, class... Views>
APEX_HD void each_group(std::index_sequence<I...>, int64_t column, int count, const Body& body,
                        const Views&... views) {
  for (int first = 0; first < count; first += kGroup) {
    const int present = count - first < kGroup ? count - first : kGroup;
    alignas(64) T values[sizeof...(Views) + 1][kGroup];
    (load_lanes(views, column + first, present, values[I]), ...);
    APEX_VECTORIZE_FEW
    for (int lane = 0; lane < kGroup; ++lane) body(first + lane, values[I][lane]...);
    (store_lanes(views, column + first, present, values[I]), ...);
  }
}

// body(lane, T& value0, ...) for `count` columns from `column` on; written values are stored. Lanes
// behind them, up to the end of a group, get zeros, and what becomes of these is not stored.
template <class T, class Body, class... Views>
APEX_HD void each_of_tail(int64_t column, int count, const Body& body, const Views&... views) {
  each_group<T>(std::index_sequence_for<Views...>{}, column, count, body, views...);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
