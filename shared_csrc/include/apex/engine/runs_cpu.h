// The same columns of several runs on the CPU, such as the heads of a token, which share vectors.
//
// A row program could take run after run, but runs of a pack or two are so short that preparing
// each takes as long as the run, and what they share would be converted for each.
#pragma once

#include <algorithm>
#include <utility>

#include "apex/engine/tails_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Whether runs of whole packs are taken by groups, too. Without masks that takes up to 1.5 times as
// long as each() (RoPE with 128 channels of bfloat16, AVX2).
inline constexpr bool kWholePacksByGroups =
#if defined(__AVX512F__)
    true;
#else
    false;
#endif

template <bool kLoads, class G, class View>
APEX_HD void load_if(const View& view, int64_t column, int count, typename G::Values& values) {
  if constexpr (kLoads) G::load(view, column, count, values);
}

template <class View, class T>
APEX_HD void keep(T& value, T result) {
  if constexpr (View::kWritten) value = result;
}

// Runs whose groups of columns are taken in turn, if a run is wider than a group. What they share
// is converted once for all of these; more of them read memory in steps, which takes longer. In
// RoPE with 128 channels, four took 0.72 to 0.95 of the time of one.
inline constexpr int64_t kRunsAtOnce = 4;

template <class G, class View>
bool are_streamed(const View& view, int64_t columns) {
  if constexpr (G::template kStreams<View>) return view.streamed && columns % G::kLanes == 0;
  return false;
}

template <class G, class View>
APEX_HD void put(const View& view, bool is_streamed, int64_t column, int count,
                 const typename G::Values& values) {
  if (G::template kStreams<View> && is_streamed) return G::stream(view, column, values);
  G::store(view, column, count, values);
}

template <class T, size_t... I, class F, class... Views>
void each_of_runs(std::index_sequence<I...>, int64_t columns, int64_t runs, const F& functor,
                  const Views&... views) {
  using G = Groups<T, kPairsOfGroups<T, true, Views...>>;
  const F own = functor;  // which no store can change, for all the compiler knows
  const int64_t at_once = columns <= G::kLanes ? runs : std::min(runs, kRunsAtOnce);
  const bool streamed[] = {are_streamed<G>(views, columns)...};
  for (int64_t begin = 0; begin < runs; begin += at_once) {
    const int64_t end = std::min(runs, begin + at_once);
    for (int64_t column = 0; column < columns; column += G::kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(columns - column, G::kLanes));
      alignas(64) typename G::Values held[sizeof...(Views)];
      (load_if<is_shared_v<Views>, G>(views, column, count, held[I]), ...);
      for (int64_t run = begin; run < end; ++run) {
        alignas(64) typename G::Values values[sizeof...(Views)];
        (load_if<!is_shared_v<Views>, G>(views, run * views.next_row + column, count, values[I]),
         ...);
        for (int group = 0; group < G::kCount; ++group) {
          APEX_VECTORIZE_FEW
          for (int lane = 0; lane < kGroup; ++lane) {
            T of_lane[] = {(is_shared_v<Views> ? held : values)[I][group][lane]...};
            own(of_lane[I]...);
            (keep<Views>(values[I][group][lane], of_lane[I]), ...);
          }
        }
        (put<G>(views, streamed[I], run * views.next_row + column, count, values[I]), ...);
      }
    }
  }
}

// functor(T& value, ...) for every column of every run. From run to run, a view goes on by its
// next_row; shared ones do not.
template <class T, class F, class... Views>
void each_of_runs(int64_t columns, int64_t runs, const F& functor, const Views&... views) {
  each_of_runs<T>(std::index_sequence_for<Views...>{}, columns, runs, functor, views...);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
