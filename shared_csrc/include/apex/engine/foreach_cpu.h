// foreach on the CPU: one parallel region over the concatenated elements of all tensors.
#pragma once

#include <algorithm>
#include <utility>

#include "apex/engine/columns.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per thread below which a second thread costs more than it brings.
inline constexpr int64_t kForeachGrain = 16384;

template <class F, class Indices, class... Columns>
struct ForeachLoop;

template <class F, size_t... I, class... Columns>
struct ForeachLoop<F, std::index_sequence<I...>, Columns...> {
  using T = typename F::value_type;
  static constexpr bool kFlags =
      !std::is_void_v<decltype(std::declval<const F&>()(((void)I, std::declval<T&>())...))>;

  template <class Column>
  static auto* at(void* data, int64_t offset) {
    return static_cast<typename Column::storage*>(data) + offset;
  }

  static int apply(const F& functor, T (&values)[sizeof...(I)][kPack]) {
    int flags = 0;
    APEX_VECTORIZE
    for (int lane = 0; lane < kPack; ++lane) {
      if constexpr (kFlags) {
        flags |= functor(values[I][lane]...);
      } else {
        functor(values[I][lane]...);
      }
    }
    return flags;
  }

  // Elements [begin, end) of one tensor.
  static int run(const F& functor, void* const* data, int64_t begin, int64_t end) {
    alignas(64) T values[sizeof...(I)][kPack];
    int flags = 0;
    int64_t i = begin;
    for (; i + kPack <= end; i += kPack) {
      ((Columns::kRead ? load_pack(at<Columns>(data[I], i), values[I]) : void()), ...);
      flags |= apply(functor, values);
      ((Columns::kWritten ? store_pack(at<Columns>(data[I], i), values[I]) : void()), ...);
    }
    if (i == end) return flags;
    int count = static_cast<int>(end - i);
    (load_some(at<Columns>(data[I], i), values[I], Columns::kRead ? count : 0), ...);
    for (int lane = 0; lane < count; ++lane) {
      if constexpr (kFlags) {
        flags |= functor(values[I][lane]...);
      } else {
        functor(values[I][lane]...);
      }
    }
    ((Columns::kWritten ? store_some(at<Columns>(data[I], i), values[I], count) : void()), ...);
    return flags;
  }
};

template <class... Columns, class Context, class F>
void foreach (const Context& context, const TensorTable& table, const F& functor) {
  using Prepared = decltype(prepared(functor));
  using Loop = ForeachLoop<Prepared, std::index_sequence_for<Columns...>, Columns...>;
  if (table.tensors() == 0 || skipped(functor)) return;
  const auto plain = prepared(functor);

  std::vector<int64_t> starts(table.tensors() + 1, 0);
  for (int64_t t = 0; t < table.tensors(); ++t) starts[t + 1] = starts[t] + table.numel[t];

  context.parallel_for(0, starts.back(), kForeachGrain, [&](int64_t begin, int64_t end) {
    int flags = 0;
    int64_t tensor = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; tensor < table.tensors() && starts[tensor] < end; ++tensor) {
      int64_t from = std::max(begin - starts[tensor], int64_t{0});
      int64_t to = std::min(end - starts[tensor], table.numel[tensor]);
      flags |= Loop::run(plain, table.row(tensor), from, to);
    }
    if constexpr (Loop::kFlags) {
      if (flags) *functor.flag = 1;  // every thread writes the same value
    }
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
