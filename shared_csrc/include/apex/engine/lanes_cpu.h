// One pack position of several operands on the CPU, as lanes for a vectorized loop.
#pragma once

#include <utility>

#include "apex/engine/pairs_cpu.h"
#include "apex/engine/stream_cpu.h"
#include "apex/engine/views.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Whether packs of a view are converted into a buffer ahead of the loop over lanes: where the view
// asks for it, and for storage whose conversion compilers do not vectorize inside a loop.
template <class View, class T>
inline constexpr bool kBuffered =
    is_generated_v<View> ||
    (!std::is_same_v<typename View::storage, T> &&
     (is_ahead_v<View>
#if defined(__F16C__)
      || (std::is_same_v<typename View::storage, Half> && std::is_same_v<T, float>)
#endif
          ));

// Of a row, or of one of kRows that each_of_rows() takes at once.
template <class T, int kRows, class Indices, class... Views>
class LanesOf;

// f(number) for 0 to kCount - 1, which are constants to the compiler.
template <int kCount, class F>
APEX_HD void each_number(const F& f) {
  [&]<int... N>(std::integer_sequence<int, N...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, N>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Usage: at(column); each(body); done().
template <class T, int kRows, size_t... I, class... Views>
class LanesOf<T, kRows, std::index_sequence<I...>, Views...> {
 public:
  explicit LanesOf(const Views&... views)
      : data_{const_cast<void*>(source_of(views))...},
        next_row_{views.next_row...},
        streamed_{is_streamed(views)...} {}

  void at(int64_t column) {
    column_ = column;
    (prefetch<I, Views>(), ...);
    (fill<I, Views>(), ...);
    (aim<I, Views>(), ...);
  }

  // functor(T& value0, T& value1, ...) on one lane; written values go back where they belong.
  template <class F>
  APEX_HD void call(const F& functor, int lane) {
    T values[sizeof...(Views) + 1] = {read<I, Views>(lane)...};
    functor(values[I]...);
    (write<I, Views>(lane, values[I]), ...);
  }

  // body(slot, T& value0, ...) for all lanes of a whole pack. The slot is the lane, or with
  // kPaired as pairs_cpu.h says.
  template <class Body>
  APEX_HD void each(const Body& body) {
    if constexpr (kPaired) {
      // Copies: stores of words could change what `this` points to, for all the compiler knows.
      const Elements own = elements();
      alignas(64) T slots[sizeof...(Views)][kPack];
      APEX_VECTORIZE
      for (int word = 0; word < kPack / 2; ++word) {
        T even[] = {read_half<Views, false>(own.sources[I], word)...};
        T odd[] = {read_half<Views, true>(own.sources[I], word)...};
        body(word, even[I]...);
        body(word + kPack / 2, odd[I]...);
        (write_word<Views>(own.targets[I], slots[I], word, even[I], odd[I]), ...);
      }
      (round_slots<I, Views>(slots[I]), ...);
    } else {
      APEX_VECTORIZE
      for (int lane = 0; lane < kPack; ++lane) {
        call([&](auto&... values) { body(lane, values...); }, lane);
      }
    }
  }

  // For every slot, begin(slot) makes a state, body(state, T& value0, ...) is called with it for
  // each of the rows, and end(slot, state) takes it. What rows share is read once for all of them.
  template <class Begin, class Body, class End>
  APEX_HD static void each_of_rows(LanesOf (&rows)[kRows], const Begin& begin, const Body& body,
                                   const End& end) {
    if constexpr (kPaired) {
      Elements elements[kRows];  // copies, as in each()
      for (int r = 0; r < kRows; ++r) elements[r] = rows[r].elements();
      alignas(64) T slots[kRows][sizeof...(Views)][kPack];
      APEX_VECTORIZE
      for (int word = 0; word < kPack / 2; ++word) {
        auto even_state = begin(word), odd_state = begin(word + kPack / 2);
        const auto* shared = elements[0].sources;
        const T even_shared[] = {is_shared_v<Views> ? read_half<Views, false>(shared[I], word)
                                                    : T(0)...};
        const T odd_shared[] = {is_shared_v<Views> ? read_half<Views, true>(shared[I], word)
                                                   : T(0)...};
        each_number<kRows>([&](auto row) __attribute__((always_inline)) {
          const Elements& of_row = elements[row];
          T even[] = {is_shared_v<Views> ? even_shared[I]
                                         : read_half<Views, false>(of_row.sources[I], word)...};
          T odd[] = {is_shared_v<Views> ? odd_shared[I]
                                        : read_half<Views, true>(of_row.sources[I], word)...};
          body(even_state, even[I]...);
          body(odd_state, odd[I]...);
          (write_word<Views>(of_row.targets[I], slots[row][I], word, even[I], odd[I]), ...);
        });
        end(word, even_state);
        end(word + kPack / 2, odd_state);
      }
      for (int r = 0; r < kRows; ++r) (rows[r].template round_slots<I, Views>(slots[r][I]), ...);
    } else {
      APEX_VECTORIZE
      for (int lane = 0; lane < kPack; ++lane) {
        auto state = begin(lane);
        const T shared[] = {is_shared_v<Views> ? rows[0].template read<I, Views>(lane) : T(0)...};
        each_number<kRows>([&](auto row) __attribute__((always_inline)) {
          LanesOf& lanes = rows[row];
          T values[] = {is_shared_v<Views> ? shared[I] : lanes.template read<I, Views>(lane)...};
          body(state, values[I]...);
          (lanes.template write<I, Views>(lane, values[I]), ...);
        });
        end(lane, state);
      }
    }
  }

  // Whether lanes are taken in pairs; see pairs_cpu.h.
  static constexpr bool kPaired = apex::kPaired<T, (kRows > 1), Views...>;

  // Whether packs of a view go through a buffer: pairs need none.
  template <class View>
  static constexpr bool kFilled = kBuffered<View, T> && !kPaired;

  void done() { (drain<I, Views>(), ...); }

 private:
  template <class View>
  static const void* source_of(const View& view) {
    if constexpr (is_generated_v<View>) {
      return &view;
    } else {
      return view.data;
    }
  }

  template <size_t K, class View>
  APEX_HD typename View::storage* source() const {
    return static_cast<typename View::storage*>(data_[K]) + column_;
  }

  template <size_t K, class View>
  APEX_HD T read(int lane) const {
    if constexpr (!View::kRead) return T(0);
    if constexpr (kFilled<View>) return buffers_[K][lane];
    return convert<T>(source<K, View>()[lane]);
  }

  template <size_t K, class View>
  APEX_HD void write(int lane, T value) {
    if constexpr (!View::kWritten) return;
    if constexpr (kFilled<View>) {
      buffers_[K][lane] = value;
    } else {
      target<K, View>()[lane] = convert<typename View::storage>(value);
    }
  }

  template <size_t K, class View>
  APEX_HD typename View::storage* target() const {
    if constexpr (!View::kWritten) return nullptr;
    return static_cast<typename View::storage*>(targets_[K]);
  }

  // Where a row of bfloat16 elements is read and written.
  struct Elements {
    const void* sources[sizeof...(Views)];
    void* targets[sizeof...(Views)];
  };
  APEX_HD Elements elements() const { return {{source<I, Views>()...}, {target<I, Views>()...}}; }

  // Of a word, one element.
  template <class View, bool kOdd>
  APEX_HD static T read_half(const void* source, int word) {
    if constexpr (!View::kRead) {
      return T(0);
    } else if constexpr (std::is_same_v<typename View::storage, BFloat16>) {
      return half_of_word<kOdd>(static_cast<const BFloat16*>(source), word);
    } else {
      return static_cast<const typename View::storage*>(source)[2 * word + kOdd];
    }
  }

  template <class View>
  APEX_HD static void write_word(void* target, T (&slots)[kPack], int word, T even, T odd) {
    if constexpr (kBySlot<View>) {
      slots[word] = even;
      slots[word + kPack / 2] = odd;
    } else if constexpr (View::kWritten) {
      store_word(static_cast<BFloat16*>(target), word, even, odd);
    }
  }

  template <size_t K, class View>
  APEX_HD void round_slots([[maybe_unused]] const T (&slots)[kPack]) const {
    if constexpr (kBySlot<View>) {
#if defined(__AVX512BW__)
      store_slots(source<K, View>(), slots, streamed_[K]);
#endif
    }
  }

  template <size_t K, class View>
  APEX_HD void prefetch() {
    if constexpr (is_shared_v<View> || is_generated_v<View>) return;
    if constexpr (View::kWritten) {
      if (streamed_[K]) return;
    }
    const char* next = reinterpret_cast<const char*>(source<K, View>() + next_row_[K]);
    constexpr int kBytes = kPack * sizeof(typename View::storage);
#pragma GCC unroll 8
    for (int b = 0; b < kBytes; b += 64) __builtin_prefetch(next + b, View::kWritten, 2);
  }

  template <size_t K, class View>
  APEX_HD void fill() {
    if constexpr (is_generated_v<View>) {
      static_cast<const View*>(data_[K])->fill(column_, buffers_[K]);
    } else if constexpr (View::kRead && kFilled<View>) {
      load_pack(source<K, View>(), buffers_[K]);
    }
  }

  template <size_t K, class View>
  APEX_HD void drain() {
    if constexpr (View::kWritten && kFilled<View>) {
      if constexpr (kStreamsPacks<typename View::storage>) {
        if (streamed_[K]) return stream_pack(source<K, View>(), buffers_[K]);
      }
      store_pack(target<K, View>(), buffers_[K]);
    }
    if constexpr (View::kWritten && !kBySlot<View>) {
      constexpr int kBytes = kPack * sizeof(typename View::storage);
      if (streamed_[K]) stream_bytes<kBytes>(source<K, View>(), targets_[K]);
    }
  }

  template <class View>
  static bool is_streamed(const View& view) {
    if constexpr (View::kWritten) return view.streamed;
    return false;
  }

  // Where a pack is written: in place, or where stream_bytes() then takes it from.
  template <size_t K, class View>
  APEX_HD void aim() {
    if constexpr (View::kWritten) {
      targets_[K] = streamed_[K] ? static_cast<void*>(outgoing_[K]) : source<K, View>();
    }
  }

  // Whether each() writes whole packs of a view at once.
  template <class View>
  static constexpr bool kBySlot =
#if defined(__AVX512BW__)
      kPaired && View::kWritten;
#else
      false;
#endif

  static constexpr bool kAnyBuffered = (kFilled<Views> || ...);
  static constexpr bool kAnyWritten = (Views::kWritten || ...);

  void* data_[sizeof...(Views) + 1];
  void* targets_[sizeof...(Views) + 1];
  int64_t next_row_[sizeof...(Views) + 1];
  bool streamed_[sizeof...(Views) + 1];
  int64_t column_ = 0;
  alignas(64) T buffers_[kAnyBuffered ? sizeof...(Views) : 1][kAnyBuffered ? kPack : 1];
  alignas(64) T outgoing_[kAnyWritten ? sizeof...(Views) : 1][kAnyWritten ? kPack : 1];
};

template <class T, class... Views>
using Lanes = LanesOf<T, 1, std::index_sequence_for<Views...>, Views...>;
template <class T, int kRows, class... Views>
using LanesOfRows = LanesOf<T, kRows, std::index_sequence_for<Views...>, Views...>;

}  // namespace APEX_BACKEND_NS
}  // namespace apex
