// One pack of several operands of a row on a GPU, in a thread's registers.
#pragma once

#include <utility>

#include "apex/core/gpu.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// A staged row: read from shared memory, or from where it came when it did not fit.
template <class S, class T>
struct StagedView {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
  const S* data;
  const T* staged;  // null if not staged
};

template <class T, int N, class Indices, class... Views>
struct GpuPack;

template <class T, int N, size_t... I, class... Views>
struct GpuPack<T, N, std::index_sequence<I...>, Views...> {
  T values[sizeof...(Views) + 1][N];

  template <class S>
  APEX_DEVICE void load(const ReadView<S>& view, int64_t column, T (&into)[N], int count) {
    if (count == N) {
      load_pack(view.data + column, into);
    } else {
      load_some(view.data + column, into, count);
    }
  }
  template <class S>
  APEX_DEVICE void load(const StagedView<S, T>& view, int64_t column, T (&into)[N], int count) {
    if (view.staged != nullptr) {
      load(ReadView<T>{view.staged}, column, into, count);
    } else {
      load(ReadView<S>{view.data}, column, into, count);
    }
  }
  template <class S>
  APEX_DEVICE void load(const WriteView<S>&, int64_t, T (&into)[N], int) {
#pragma unroll
    for (int i = 0; i < N; ++i) into[i] = T(0);
  }
  template <class Numbers>
  APEX_DEVICE void load(const GeneratedView<Numbers>& view, int64_t column, T (&into)[N], int) {
    view.fill(column, into);
  }
  template <class View>
  APEX_DEVICE void store(const View& view, int64_t column, const T (&from)[N], int count) {
    if constexpr (View::kWritten) {
      if (count == N) {
        store_pack(view.data + column, from);
      } else {
        store_some(view.data + column, from, count);
      }
    }
  }

  APEX_DEVICE void load_all(int64_t column, int count, const Views&... views) {
    (load(views, column, values[I], count), ...);
  }
  APEX_DEVICE void store_all(int64_t column, int count, const Views&... views) {
    (store(views, column, values[I], count), ...);
  }
  template <class F>
  APEX_DEVICE auto call(const F& functor, int lane) {
    return functor(values[I][lane]...);
  }
  template <class F, class Sums>
  APEX_DEVICE void call_into(const F& functor, Sums& sums, int lane) {
    functor(sums, values[I][lane]...);
  }
};

template <class View>
inline constexpr bool is_staged_v = false;
template <class S, class T>
inline constexpr bool is_staged_v<StagedView<S, T>> = true;

// Whether packs of N elements may be read at every multiple of N of this view. Staged rows are
// aligned in shared memory.
template <int N, class View>
APEX_DEVICE bool view_aligned(const View& view) {
  if constexpr (is_generated_v<View>) {
    return true;
  } else if constexpr (is_staged_v<View>) {
    return view.staged != nullptr || is_aligned<N>(view.data);
  } else {
    return is_aligned<N>(view.data);
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
