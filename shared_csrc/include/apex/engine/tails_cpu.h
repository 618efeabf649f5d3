// The end of a row on the CPU, less than a pack, as groups of lanes for vectorized loops.
#pragma once

#include <algorithm>
#include <utility>

#include "apex/engine/pairs_cpu.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// A group of lanes of several operands, or with kPairs, two groups by slot; see pairs_cpu.h.
template <class T, bool kPairs>
struct Groups {
  static constexpr int kCount = kPairs ? 2 : 1, kLanes = kCount * kGroup;
  using Values = T[kCount][kGroup];

  // The element, counted from the first of the groups, that lies in a lane.
  static constexpr int element(int group, int lane) { return kPairs ? 2 * lane + group : lane; }

  // Elements from `column` on, at least one; lanes behind the first `count` get zeros.
  template <class View>
  APEX_HD static void load(const View& view, int64_t column, int count, Values& values) {
    if constexpr (is_generated_v<View>) {
      static_assert(!kPairs);
      view.fill(column, values[0]);
    } else if constexpr (!View::kRead) {
      for (auto& group : values) std::fill_n(group, kGroup, T(0));
    } else if constexpr (kPairs) {
      load_pairs(view.data + column, values[0], values[1], count);
    } else {
      load_group(view.data + column, values[0], count);
    }
  }

  template <class View>
  APEX_HD static void store(const View& view, int64_t column, int count, const Values& values) {
    if constexpr (View::kWritten && kPairs) {
      store_pairs(view.data + column, values[0], values[1], count);
    } else if constexpr (View::kWritten) {
      store_group(view.data + column, values[0], count);
    }
  }

  // Whether all lanes of a view are whole lines of the cache, which stream() writes around it.
  template <class View>
  static constexpr bool kStreams =
      View::kWritten && (kPairs || std::is_same_v<typename View::storage, T>);

  template <class View>
  APEX_HD static void stream(const View& view, int64_t column, const Values& values) {
    if constexpr (kStreams<View> && kPairs) {
      stream_pairs(view.data + column, values[0], values[1]);
    } else if constexpr (kStreams<View>) {
      stream_bytes<sizeof(values[0])>(view.data + column, values[0]);
    }
  }
};

// A lane of a tail: its slot among all of them and in its group, and whether there is a column.
struct TailLane {
  int slot, of_group;
  bool is_present;
};

template <class G, size_t... I, class Body, class After, class... Views>
APEX_HD void each_group(std::index_sequence<I...>, int64_t column, int count, const Body& body,
                        const After& after, const Views&... views) {
  for (int first = 0; first < count; first += G::kLanes) {
    alignas(64) typename G::Values values[sizeof...(Views) + 1];
    (G::load(views, column + first, count - first, values[I]), ...);
    for (int group = 0; group < G::kCount; ++group) {
      APEX_VECTORIZE_FEW
      for (int lane = 0; lane < kGroup; ++lane) {
        const bool is_present = first + G::element(group, lane) < count;
        body(TailLane{first + group * kGroup + lane, lane, is_present}, values[I][group][lane]...);
      }
      after();
    }
    (G::store(views, column + first, count - first, values[I]), ...);
  }
}

// Whether lanes of a tail lie by slot. Of two groups of a short one, one would be empty; and what
// masks leave out is fetched all the same: rows of 16 columns, picked at random, took three times
// the time.
template <class T, class... Views>
APEX_HD bool is_tail_paired(int64_t count) {
  return kPairsOfGroups<T, false, Views...> && count > kGroup;
}

// body(TailLane, T& value0, ...) for `count` columns from `column` on; written values are stored.
// Lanes behind them, up to the end of a group, get zeros, and what becomes of these is not stored.
// after() follows each group of kGroup lanes.
template <class T, class Body, class After, class... Views>
APEX_HD void each_group_of_tail(int64_t column, int count, const Body& body, const After& after,
                                const Views&... views) {
  constexpr auto kViews = std::index_sequence_for<Views...>{};
  if constexpr (kPairsOfGroups<T, false, Views...>) {
    if (is_tail_paired<T, Views...>(count)) {
      return each_group<Groups<T, true>>(kViews, column, count, body, after, views...);
    }
  }
  each_group<Groups<T, false>>(kViews, column, count, body, after, views...);
}

template <class T, class Body, class... Views>
APEX_HD void each_of_tail(int64_t column, int count, const Body& body, const Views&... views) {
  each_group_of_tail<T>(column, count, body, [] {}, views...);
}

// The same in order of columns: the slot is the lane.
template <class T, class Body, class... Views>
APEX_HD void each_in_order(int64_t column, int count, const Body& body, const Views&... views) {
  using G = Groups<T, false>;
  each_group<G>(std::index_sequence_for<Views...>{}, column, count, body, [] {}, views...);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
