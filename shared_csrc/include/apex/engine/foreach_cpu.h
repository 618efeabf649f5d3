// foreach on the CPU: one parallel region over the concatenated elements of all tensors.
#pragma once

#include <algorithm>
#include <utility>

#include "apex/engine/columns.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per thread below which a second thread costs more than it brings.
inline constexpr int64_t kForeachGrain = 16384;

// How the columns of one pack reach a functor that computes in T.
//
// Columns of another type than T are converted a pack at a time into a buffer; the others are used
// where they are, which saves a store and a load per element.
template <class T, class Column>
struct ColumnLanes {
  using S = typename Column::storage;
  static constexpr bool kConverted = !std::is_same_v<S, T>;

  static S* at(void* data, int64_t offset) { return static_cast<S*>(data) + offset; }

  static T* of(void* data, int64_t offset, T (&buffer)[kPack]) {
    if constexpr (kConverted) return buffer;
    if constexpr (!kConverted) return at(data, offset);
  }

  static T read(const T* lanes, int lane) {
    if constexpr (Column::kRead) return lanes[lane];
    return T(0);
  }

  static void write(T* lanes, int lane, T value) {
    if constexpr (Column::kWritten) lanes[lane] = value;
  }

  static void fill(void* data, int64_t offset, int count, T (&buffer)[kPack], Storage = {}) {
    if constexpr (kConverted && Column::kRead) {
      if (count == kPack) {
        load_pack(at(data, offset), buffer);
      } else {
        load_some(at(data, offset), buffer, count);
      }
    }
  }

  static void drain(void* data, int64_t offset, int count, const T (&buffer)[kPack], Storage = {}) {
    if constexpr (kConverted && Column::kWritten) {
      if (count == kPack) {
        store_pack(at(data, offset), buffer);
      } else {
        store_some(at(data, offset), buffer, count);
      }
    }
  }
};

// The same where only the table knows the storage.
template <class T, template <class> class Access>
struct ColumnLanes<T, Access<AnyFloat>> {
  template <class S>
  using Typed = ColumnLanes<T, Access<S>>;

  static T* of(void*, int64_t, T (&buffer)[kPack]) { return buffer; }
  static T read(const T* lanes, int lane) { return Typed<Half>::read(lanes, lane); }
  static void write(T* lanes, int lane, T value) { Typed<Half>::write(lanes, lane, value); }

  static void fill(void* data, int64_t offset, int count, T (&buffer)[kPack], Storage storage) {
    if constexpr (Access<AnyFloat>::kRead) {
      dispatch_storage(storage, [&]<class S>() {
        if constexpr (std::is_same_v<S, T>) {
          std::copy_n(Typed<S>::at(data, offset), count, buffer);
        } else {
          Typed<S>::fill(data, offset, count, buffer);
        }
      });
    }
  }

  static void drain(void* data, int64_t offset, int count, const T (&buffer)[kPack],
                    Storage storage) {
    if constexpr (Access<AnyFloat>::kWritten) {
      dispatch_storage(storage, [&]<class S>() {
        if constexpr (std::is_same_v<S, T>) {
          std::copy_n(buffer, count, Typed<S>::at(data, offset));
        } else {
          Typed<S>::drain(data, offset, count, buffer);
        }
      });
    }
  }
};

template <class F, class Indices, class... Columns>
struct ForeachLoop;

template <class F, size_t... I, class... Columns>
struct ForeachLoop<F, std::index_sequence<I...>, Columns...> {
  using T = typename F::value_type;
  using Number = typename GeneratedNumber<F>::type;
  static constexpr bool kFlags = !std::is_void_v<decltype(call_functor(
      std::declval<const F&>(), Number{}, ((void)I, std::declval<T&>())...))>;

  // Applies the functor to `count` lanes. By value and inline, so that the compiler sees that the
  // pointers are the loop's own.
  template <class... Pointers>
  APEX_HD static int apply(const F functor, int count, [[maybe_unused]] const Number* numbers,
                           Pointers... lanes) {
    int flags = 0;
    APEX_VECTORIZE
    for (int lane = 0; lane < count; ++lane) {
      T values[sizeof...(I)] = {ColumnLanes<T, Columns>::read(lanes, lane)...};
      Number number{};
      if constexpr (generates_v<F>) number = numbers[lane];
      if constexpr (kFlags) {
        flags |= call_functor(functor, number, values[I]...);
      } else {
        call_functor(functor, number, values[I]...);
      }
      (ColumnLanes<T, Columns>::write(lanes, lane, values[I]), ...);
    }
    return flags;
  }

  // `count` elements from `offset` on, at most a pack.
  APEX_HD static int piece(const F& functor, void* const* data,
                           const Array<Storage, sizeof...(I)>& storage, int64_t offset, int count,
                           const Number* numbers, T (&buffers)[sizeof...(I)][kPack]) {
    (ColumnLanes<T, Columns>::fill(data[I], offset, count, buffers[I], storage[I]), ...);
    int flags =
        apply(functor, count, numbers, ColumnLanes<T, Columns>::of(data[I], offset, buffers[I])...);
    (ColumnLanes<T, Columns>::drain(data[I], offset, count, buffers[I], storage[I]), ...);
    return flags;
  }

  APEX_HD static const Number* numbers_at(const Number* numbers, int64_t place) {
    return generates_v<F> ? numbers + place : numbers;
  }

  // Elements [begin, end) of one tensor; `numbers` are those from `first` on.
  APEX_HD static int pieces(const F& functor, void* const* data,
                            const Array<Storage, sizeof...(I)>& storage, int64_t begin, int64_t end,
                            const Number* numbers, int64_t first) {
    alignas(64) T buffers[sizeof...(I)][kPack];
    int flags = 0;
    int64_t i = begin;
    for (; i + kPack <= end; i += kPack) {
      flags |= piece(functor, data, storage, i, kPack, numbers_at(numbers, i - first), buffers);
    }
    if (i == end) return flags;
    const int count = static_cast<int>(end - i);
    return flags | piece(functor, data, storage, i, count, numbers_at(numbers, i - first), buffers);
  }

  // The same, with numbers from the functor's generator, a run at a time.
  static int run(const F& functor, void* const* data, const Array<Storage, sizeof...(I)>& storage,
                 int64_t begin, int64_t end) {
    if constexpr (generates_v<F>) {
      constexpr int kRun = std::remove_cvref_t<decltype(functor.generator())>::kRun;
      alignas(64) Number numbers[kRun];
      int flags = 0;
      for (int64_t i = begin; i < end;) {
        const int64_t first = i / kRun * kRun, last = std::min(first + kRun, end);
        functor.generator().fill(static_cast<uint64_t>(first), numbers);
        flags |= pieces(functor, data, storage, i, last, numbers, first);
        i = last;
      }
      return flags;
    } else {
      const Number none{};
      return pieces(functor, data, storage, begin, end, &none, begin);
    }
  }
};

template <class... Columns, class Context, class F>
void foreach(const Context& context, const TensorTable& table, const F& functor) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  using Loop = ForeachLoop<Own, std::index_sequence_for<Columns...>, Columns...>;
  if (table.tensors() == 0 || skipped(functor)) return;
  const auto plain = prepared(functor);
  const auto storage = table.storages<sizeof...(Columns)>();

  std::vector<int64_t> starts(table.tensors() + 1, 0);
  for (int64_t t = 0; t < table.tensors(); ++t) starts[t + 1] = starts[t] + table.numel[t];

  context.parallel_for(0, starts.back(), kForeachGrain, [&](int64_t begin, int64_t end) {
    int flags = 0;
    int64_t tensor = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; tensor < table.tensors() && starts[tensor] < end; ++tensor) {
      int64_t from = std::max(begin - starts[tensor], int64_t{0});
      int64_t to = std::min(end - starts[tensor], table.numel[tensor]);
      flags |= Loop::run(of_tensor(plain, tensor), table.row(tensor), storage, from, to);
    }
    if constexpr (Loop::kFlags) {
      if (flags) *plain.flag = 1;  // every thread writes the same value
    }
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
