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

  // Columns of another type than T are converted a pack at a time into a buffer; the others are
  // used where they are, which saves a store and a load per element.
  template <class Column>
  static constexpr bool kConverted = !std::is_same_v<typename Column::storage, T>;

  template <class Column>
  static T* lanes_of(void* data, int64_t offset, T (&buffer)[kPack]) {
    if constexpr (kConverted<Column>) return buffer;
    if constexpr (!kConverted<Column>) return at<Column>(data, offset);
  }

  template <class Column>
  static T read(const T* lanes, int lane) {
    if constexpr (Column::kRead) return lanes[lane];
    return T(0);
  }

  template <class Column>
  static void write(T* lanes, int lane, T value) {
    if constexpr (Column::kWritten) lanes[lane] = value;
  }

  // Applies the functor to `count` lanes. By value and inline, so that the compiler sees that the
  // pointers are the loop's own.
  template <class... Pointers>
  APEX_HD static int apply(const F functor, int count, Pointers... lanes) {
    int flags = 0;
    APEX_VECTORIZE
    for (int lane = 0; lane < count; ++lane) {
      T values[sizeof...(I)] = {read<Columns>(lanes, lane)...};
      if constexpr (kFlags) {
        flags |= functor(values[I]...);
      } else {
        functor(values[I]...);
      }
      (write<Columns>(lanes, lane, values[I]), ...);
    }
    return flags;
  }

  template <class Column>
  static void fill(void* data, int64_t offset, int count, T (&buffer)[kPack]) {
    if constexpr (kConverted<Column> && Column::kRead) {
      if (count == kPack) {
        load_pack(at<Column>(data, offset), buffer);
      } else {
        load_some(at<Column>(data, offset), buffer, count);
      }
    }
  }

  template <class Column>
  static void drain(void* data, int64_t offset, int count, const T (&buffer)[kPack]) {
    if constexpr (kConverted<Column> && Column::kWritten) {
      if (count == kPack) {
        store_pack(at<Column>(data, offset), buffer);
      } else {
        store_some(at<Column>(data, offset), buffer, count);
      }
    }
  }

  // Elements [begin, end) of one tensor.
  static int run(const F& functor, void* const* data, int64_t begin, int64_t end) {
    alignas(64) T buffers[sizeof...(I)][kPack];
    int flags = 0;
    int64_t i = begin;
    for (; i + kPack <= end; i += kPack) {
      (fill<Columns>(data[I], i, kPack, buffers[I]), ...);
      flags |= apply(functor, kPack, lanes_of<Columns>(data[I], i, buffers[I])...);
      (drain<Columns>(data[I], i, kPack, buffers[I]), ...);
    }
    if (i == end) return flags;
    int count = static_cast<int>(end - i);
    (fill<Columns>(data[I], i, count, buffers[I]), ...);
    flags |= apply(functor, count, lanes_of<Columns>(data[I], i, buffers[I])...);
    (drain<Columns>(data[I], i, count, buffers[I]), ...);
    return flags;
  }
};

template <class... Columns, class Context, class F>
void foreach(const Context& context, const TensorTable& table, const F& functor) {
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
