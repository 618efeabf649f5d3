// Row programs on the CPU, and several rows at once for those to which all rows are alike.
//
// What rows share, such as a channel's mean or its running sum, is then loaded (and stored) once
// for all of them: that was half of the time of batch norm.
#pragma once

#include <utility>

#include "apex/engine/rowwise_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// How many rows a program takes at once on the CPU. One that says
//   static constexpr int kRowsAtOnce = 2;
// may call columns(), in(), out(), shared(), each() and accumulate() of a row, and nothing else. It
// may name its operands' storage_type, see takes_several().
template <class Program>
inline constexpr int kRowsAtOnce = 1;
template <class Program>
  requires requires { Program::kRowsAtOnce; }
inline constexpr int kRowsAtOnce<Program> = Program::kRowsAtOnce;

// Whether the registers hold several rows of such operands: with 16 of them, rounding a result to
// 16 bits takes most, and two rows at once took up to 1.2 times the time of one after the other.
#if defined(__x86_64__) && !defined(__AVX512F__)
template <class... Views>
inline constexpr bool kHoldSeveral =
    !((Views::kWritten && sizeof(typename Views::storage) == 2) || ...);
#else
template <class... Views>
inline constexpr bool kHoldSeveral = true;
#endif

// Consecutive rows, of which the first is where views begin.
template <class T, int kCount>
class SeveralRows : Row<T> {
 public:
  static constexpr int kRows = kCount;
  using Row<T>::Row, Row<T>::move_to, Row<T>::columns, Row<T>::in, Row<T>::shared;
  using Row<T>::order_sums;

  template <class S>
  WriteView<S> out(S* matrix) const {
    constexpr int64_t kLine = 64;
    WriteView<S> view = this->result(matrix, columns(), kStreamingOfRows);
    view.streamed = view.streamed && columns() * sizeof(S) % kLine == 0;  // as all rows must be
    return view;
  }

  template <class F, class... Views>
  void each(const F& functor, const Views&... views) const {
    if constexpr (!kHoldSeveral<Views...>) {
      for (int row = 0; row < kCount; ++row) Row<T>::each(functor, of_row(row, views)...);
      return;
    }
    const F own = functor;  // which no store can change, for all the compiler knows
    struct Nothing {};
    each_pack([](int64_t) {}, [](int) { return Nothing{}; },
              [own](Nothing, auto&... values) { own(values...); }, [](int, Nothing) {}, views...);
    end_of_each_row(
        [&](int64_t column, int count, const auto&... of_row) {
          Row<T>::each_of_end(column, count, functor, of_row...);
        },
        views...);
  }

  template <int N, class F, class... Views>
  void accumulate(const F& functor, const Views&... views) {
    if constexpr (!kHoldSeveral<Views...>) {
      for (int row = 0; row < kCount; ++row) {
        Row<T>::template accumulate<N>(functor, of_row(row, views)...);
      }
      return;
    }
    this->template lay_sums_of<LanesOfRows<T, kCount, Views...>, Views...>();
    const int64_t stride = sums_stride(columns());
    T* first = nullptr;
    each_pack([&](int64_t column) { first = this->sums_ + column; },
              [&](int slot) {
                Array<T, N> sums;
                for (int n = 0; n < N; ++n) sums[n] = first[n * stride + slot];
                return sums;
              },
              functor,
              [&](int slot, const Array<T, N>& sums) {
                for (int n = 0; n < N; ++n) first[n * stride + slot] = sums[n];
              },
              views...);
    end_of_each_row(
        [&](int64_t column, int count, const auto&... of_row) {
          this->template accumulate_end<N>(column, count, functor, of_row...);
        },
        views...);
  }

 private:
  // The view of a later row.
  template <class View>
  static View of_row(int row, View view) {
    if constexpr (!is_shared_v<View>) view.data += row * view.next_row;
    return view;
  }

  // A view, of which the row after those at once comes next.
  template <class View>
  static View of_every(View view) {
    view.next_row *= kCount;
    return view;
  }

  // See LanesOf::each_of_rows(); at(column) comes before each pack.
  template <class At, class Begin, class Body, class End, class... Views>
  void each_pack(const At& at, const Begin& begin, const Body& body, const End& end,
                 const Views&... views) const {
    using Pack = LanesOfRows<T, kCount, Views...>;
    [&]<int... R>(std::integer_sequence<int, R...>) {
      Pack rows[] = {make_pack<Pack>(R, views...)...};
      for (int64_t column = 0; column + kPack <= columns(); column += kPack) {
        at(column);
        (rows[R].at(column), ...);
        Pack::each_of_rows(rows, begin, body, end);
        (rows[R].done(), ...);
      }
    }(std::make_integer_sequence<int, kCount>{});
  }

  template <class Pack, class... Views>
  static Pack make_pack(int row, const Views&... views) {
    return Pack(of_every(of_row(row, views))...);
  }

  template <class F, class... Views>
  void end_of_each_row(const F& f, const Views&... views) const {
    const int count = static_cast<int>(columns() % kPack);
    if (count == 0) return;
    for (int row = 0; row < kCount; ++row) f(columns() - count, count, of_row(row, views)...);
  }
};

// Whether rows of so many columns are taken several at once. Of two or three wide packs each,
// several in turn are no stream that a processor reads ahead: beyond the caches, batch norm of 128
// and 192 channels of float32 took 1.1 to 1.5 times as long.
template <class Program>
bool takes_several(int64_t columns) {
  if constexpr (requires { typename Program::storage_type; }) {
    constexpr bool kAreWide = sizeof(typename Program::storage_type) > 2;
    if (kAreWide && columns > kPack && columns < 4 * kPack) return false;
  }
  return columns >= kPack;
}

// Calls body(row, begin, end) for rows [begin, end): with those that `Program` takes several at
// once, and with the rest. Inlined, bodies too: a row that is an argument lives in memory, and then
// short ones took 1.5 times the time.
template <class Program, class T, class Body>
APEX_HD void by_rows_at_once(int64_t rows, int64_t columns, T* sums, int64_t begin, int64_t end,
                             const Body& body) {
  if constexpr (constexpr int kCount = kRowsAtOnce<Program>; kCount > 1) {
    if (takes_several<Program>(columns)) {
      SeveralRows<T, kCount> several(rows, columns, sums);
      const int64_t whole = end - (end - begin) % kCount;
      body(several, begin, whole);
      begin = whole;
    }
  }
  Row<T, kHasTerms<Program>> row(rows, columns, sums);
  [[maybe_unused]] std::unique_ptr<T[], DeleteSums> terms;
  if constexpr (kHasTerms<Program>) {
    terms = zero_sums<T>(sums_stride(columns));
    row.set_terms(terms.get());
  }
  body(row, begin, end);
}

// The program's rows [begin, end) of `rows`.
template <class Program>
void run_rows(int64_t rows, int64_t columns, int64_t begin, int64_t end, const Program& program) {
  using T = typename Program::value_type;
  auto run = [&](auto& row, int64_t first, int64_t last) __attribute__((always_inline)) {
    for (int64_t index = first; index < last; index += std::decay_t<decltype(row)>::kRows) {
      row.move_to(index);
      program.row(row);
    }
  };
  by_rows_at_once<Program>(rows, columns, static_cast<T*>(nullptr), begin, end, run);
}

template <class Context, RowProgram Program>
void rowwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  int64_t grain = std::max<int64_t>(1, kRowwiseGrain / std::max<int64_t>(columns, 1));
  context.parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    run_rows(rows, columns, begin, end, program);
    finish_streams();
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
