// Row programs on the CPU: a row at a time per thread, packs of kPack lanes.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "apex/engine/fold_cpu.h"
#include "apex/engine/lanes_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per thread below which a second thread costs more than it brings.
inline constexpr int64_t kRowwiseGrain = 16384;
// Packs added into one set of float lanes before these are added to a double: bounds the error.
inline constexpr int kPacksPerFlush = 64;

template <class T>
T tree_sum(T (&lanes)[kPack]) {
  for (int width = kPack / 2; width > 0; width /= 2) {
    APEX_VECTORIZE
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class T>
class Row {
 public:
  Row(int64_t columns, T* scratch, T* sums) : columns_(columns), scratch_(scratch), sums_(sums) {}

  void move_to(int64_t index) { index_ = index; }
  int64_t index() const { return index_; }
  int64_t columns() const { return columns_; }

  // This row of a matrix [rows, columns], for reading or writing.
  template <class S>
  ReadView<S> in(const S* matrix) const {
    return {matrix + index_ * columns_};
  }
  // The same of a matrix whose rows begin `stride` elements apart.
  template <class S>
  ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride};
  }
  template <class S>
  WriteView<S> out(S* matrix) const {
    return {matrix + index_ * columns_};
  }
  // A vector [columns] that all rows share.
  template <class S>
  ReadView<S> shared(const S* vector) const {
    return {vector};
  }

  // A view of 16-bit elements that a long functor reads or writes.
  template <class View>
  AheadView<View> ahead(const View& view) const {
    return {view};
  }

  // This row of a matrix, converted once for several passes. Slots count from 0 up to kStages.
  template <class S>
  auto stage(int slot, const S* matrix) const {
    if constexpr (std::is_same_v<S, T>) {
      (void)slot;
      return in(matrix);
    } else {
      T* into = scratch_ + slot * columns_;
      each([](T x, T& y) { y = x; }, in(matrix), WriteView<T>{into});
      return ReadView<T>{into};
    }
  }

  // What program.row() staged in this slot, for the column_sums() that follows it in
  // rowwise_colwise().
  template <class S>
  auto staged(int slot, const S* matrix) const {
    if constexpr (std::is_same_v<S, T>) {
      (void)slot;
      return in(matrix);
    } else {
      return ReadView<T>{scratch_ + slot * columns_};
    }
  }

  // Sum over the row of functor(values...), which returns T.
  template <class F, class... Views>
  T sum(const F& functor, const Views&... views) const {
    auto wrapped = [&](auto&... values) { return Array<T, 1>{{functor(values...)}}; };
    return sums<1>(wrapped, views...)[0];
  }

  // N sums in one pass; the functor returns Array<T, N>.
  template <int N, class F, class... Views>
  Array<T, N> sums(const F& functor, const Views&... views) const {
    alignas(64) T lanes[N][kPack] = {};
    double totals[N] = {};
    Lanes<T, Views...> pack(views...);
    int64_t column = 0;
    int packs = 0;
    for (; column + kPack <= columns_; column += kPack) {
      pack.at(column);
      APEX_VECTORIZE
      for (int lane = 0; lane < kPack; ++lane) {
        Array<T, N> terms = pack.call(functor, lane);
        for (int n = 0; n < N; ++n) lanes[n][lane] += terms[n];
      }
      if (++packs == kPacksPerFlush) {
        flush<N>(lanes, totals);
        packs = 0;
      }
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      pack.at(column, count);
      for (int lane = 0; lane < count; ++lane) {
        Array<T, N> terms = pack.call(functor, lane);
        for (int n = 0; n < N; ++n) lanes[n][lane] += terms[n];
      }
    }
    flush<N>(lanes, totals);
    Array<T, N> result;
    for (int n = 0; n < N; ++n) result[n] = static_cast<T>(totals[n]);
    return result;
  }

  // Largest functor(values...) of the row; -inf without columns, NaN if any value is NaN.
  template <class F, class... Views>
  T max(const F& functor, const Views&... views) const {
    alignas(64) T lanes[kPack];
    std::fill(lanes, lanes + kPack, -std::numeric_limits<T>::infinity());
    Lanes<T, Views...> pack(views...);
    int64_t column = 0;
    for (; column + kPack <= columns_; column += kPack) {
      pack.at(column);
      APEX_VECTORIZE
      for (int lane = 0; lane < kPack; ++lane) {
        lanes[lane] = max_propagating_nan(pack.call(functor, lane), lanes[lane]);
      }
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      pack.at(column, count);
      for (int lane = 0; lane < count; ++lane) {
        lanes[lane] = max_propagating_nan(pack.call(functor, lane), lanes[lane]);
      }
    }
    T result = lanes[0];
    for (int lane = 1; lane < kPack; ++lane) result = max_propagating_nan(lanes[lane], result);
    return result;
  }

  // functor(T& value, ...) for every column; values of written views are stored.
  template <class F, class... Views>
  void each(const F& functor, const Views&... views) const {
    Lanes<T, Views...> pack(views...);
    int64_t column = 0;
    for (; column + kPack <= columns_; column += kPack) {
      pack.at(column);
      APEX_VECTORIZE
      for (int lane = 0; lane < kPack; ++lane) pack.call(functor, lane);
      pack.done();
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      pack.at(column, count);
      for (int lane = 0; lane < count; ++lane) pack.call(functor, lane);
      pack.done(count);
    }
  }

  // A reduction of one's own: functor(Array<T, N>& state, values...) adds a column to a state,
  // which began as `empty`; merge(a, b) returns the state of both a's columns and b's.
  template <int N, class F, class Merge, class... Views>
  Array<T, N> fold(const Array<T, N>& empty, const F& functor, const Merge& merge,
                   const Views&... views) const {
    return fold_columns(columns_, empty, functor, merge, views...);
  }

  // functor(T& value, ...) for one column, after an `each` over the same views.
  template <class F, class... Views>
  void at(int64_t column, const F& functor, const Views&... views) const {
    Lanes<T, Views...> pack(views...);
    pack.at(column, 1);
    pack.call(functor, 0);
    pack.done(1);
  }

  // Once per row, for scalars such as a row's mean.
  template <class F>
  void once(const F& f) const {
    f();
  }

  // functor(Array<T, N>& sums, values...) for every column, with that column's running sums.
  template <int N, class F, class... Views>
  void accumulate(const F& functor, const Views&... views) const {
    Lanes<T, Views...> pack(views...);
    int64_t column = 0;
    for (; column + kPack <= columns_; column += kPack) {
      pack.at(column);
      accumulate_lanes<N>(functor, pack, column, kPack);
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      pack.at(column, count);
      accumulate_lanes<N>(functor, pack, column, count);
    }
  }

 private:
  template <int N>
  static void flush(T (&lanes)[N][kPack], double (&totals)[N]) {
    for (int n = 0; n < N; ++n) {
      totals[n] += tree_sum(lanes[n]);
      std::fill(lanes[n], lanes[n] + kPack, T(0));
    }
  }

  template <int N, class F, class P>
  void accumulate_lanes(const F& functor, P& pack, int64_t column, int count) const {
    T* base = sums_ + column;
    alignas(64) T lanes[N][kPack];
    for (int n = 0; n < N; ++n) load_some(base + n * columns_, lanes[n], count);
    APEX_VECTORIZE
    for (int lane = 0; lane < count; ++lane) {
      Array<T, N> sums;
      for (int n = 0; n < N; ++n) sums[n] = lanes[n][lane];
      pack.call_into(functor, sums, lane);
      for (int n = 0; n < N; ++n) lanes[n][lane] = sums[n];
    }
    for (int n = 0; n < N; ++n) store_some(base + n * columns_, lanes[n], count);
  }

  int64_t index_ = 0, columns_;
  T* scratch_;  // [kStages, columns]
  T* sums_;     // [kSums, columns] of this thread, or null
};

template <class Program>
constexpr int stages_of() {
  if constexpr (requires { Program::kStages; }) return Program::kStages;
  return 0;
}

template <class Context, class Program>
void rowwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  using T = typename Program::value_type;
  int64_t grain = std::max<int64_t>(1, kRowwiseGrain / std::max<int64_t>(columns, 1));
  context.parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> scratch(new T[stages_of<Program>() * columns]);
    Row<T> row(columns, scratch.get(), nullptr);
    for (int64_t index = begin; index < end; ++index) {
      row.move_to(index);
      program.row(row);
    }
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
