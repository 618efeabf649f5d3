// What row and column programs are, and what a row offers them.
//
// Row<T> of both backends satisfies RowOf<T>, and what a program sees of a row while columns are
// added up, ColumnRowOf<T>. Functors see numbers of type T, however operands are stored; those of
// `each` get a reference where they write.
#pragma once

#include <concepts>
#include <type_traits>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Functors that a row is tried with.
template <class T, int N>
struct RowProbe {
  APEX_HD Array<T, N> operator()(T) const { return {}; }
};
template <class T>
struct RowProbe<T, 1> {
  APEX_HD T operator()(T x) const { return x; }
};
template <class T>
struct RowWriteProbe {
  APEX_HD void operator()(T& y, T x) const { y = x; }
};
template <class T, int N>
struct RowFoldProbe {
  APEX_HD void operator()(Array<T, N>& state, T x) const { state[0] += x; }
  APEX_HD Array<T, N> operator()(const Array<T, N>& a, const Array<T, N>&) const { return a; }
};
struct RowNumbersProbe {
  template <int N, class T>
  APEX_HD void fill(uint64_t, T (&)[N]) const {}
};
struct RowTermsProbe {
  template <class T, class EachTerm>
  APEX_HD void operator()(T, const EachTerm&) const {}
};
struct RowOnceProbe {
  APEX_HD void operator()() const {}
};

// Reading one row of operands [rows, columns].
template <class R>
concept ReadableRow = requires(const R& row, const float* matrix, int64_t stride) {
  { row.index() } -> std::same_as<int64_t>;
  { row.columns() } -> std::same_as<int64_t>;
  row.in(matrix);             // this row of a matrix without gaps between rows,
  row.in(matrix, stride);     // or of one whose rows begin `stride` elements apart
  row.shared(matrix);         // a vector [columns] that all rows share
  row.ahead(row.in(matrix));  // a view of 16-bit elements in a long functor, as one with an exp
};

template <class R, class T>
concept RowOf = ReadableRow<R> && requires(R& row, const float* matrix, float* result,
                                           int64_t stride, T one, Array<T, 2> two) {
  { row.within(stride, stride) } -> std::same_as<R>;  // columns [begin, end) of the same row
  row.out(result);                                    // this row of a result, for `each`
  row.out(result, stride);
  row.from(matrix, stride);  // a row at any address, for reading; and for writing
  row.to(result);
  row.generated(RowNumbersProbe{});  // numbers made by index, such as random ones
  row.stage(matrix);                 // read several times
  // each(functor, row.out(result), views...), staged as it was rounded
  row.stage_result(result, RowWriteProbe<T>{}, row.in(matrix));
  row.pivot(row.stage(matrix));  // a number near the row's mean
  // reductions, whose functors may write: one sum, several in a pass, the largest (of those that
  // are not NaN), one's own
  { row.sum(RowProbe<T, 1>{}, row.in(matrix)) } -> std::same_as<T>;
  { row.template sums<2>(RowProbe<T, 2>{}, row.in(matrix)) } -> std::same_as<Array<T, 2>>;
  { row.max(RowProbe<T, 1>{}, row.in(matrix)) } -> std::same_as<T>;
  {
    row.template fold<2>(two, RowFoldProbe<T, 2>{}, RowFoldProbe<T, 2>{}, row.in(matrix))
  } -> std::same_as<Array<T, 2>>;
  row.with_terms(RowProbe<T, 1>{}, RowTermsProbe{}, row.in(matrix));  // a sum, and its terms again
  // sums, and in the same pass what accumulate() does
  row.template sums_and_columns<2, 2>(RowProbe<T, 2>{}, RowFoldProbe<T, 2>{}, row.in(matrix));
  row.each(RowWriteProbe<T>{}, row.out(result), row.in(matrix));
  // each() for several runs, of which the next begins `stride` elements on; shared() stays
  row.each_of(stride, RowWriteProbe<T>{}, row.to(result, stride), row.from(matrix, stride));
  row.at(stride, RowWriteProbe<T>{}, row.out(result), row.in(matrix));  // one column, after `each`
  row.once(RowOnceProbe{});  // for numbers of the row, such as its mean
};

// Adding rows to N numbers of every column.
template <class R, class T, int N>
concept ColumnRowOf = requires(R& row, const float* matrix, float* result, int64_t stride) {
  row.columns();
  row.in(matrix);
  row.in(matrix, stride);
  row.shared(matrix);
  row.ahead(row.in(matrix));
  row.out(result);  // this row of a result, for the functor to write
  row.template accumulate<N>(RowFoldProbe<T, N>{}, row.in(matrix));
};

// Whether accumulate() is given what makes the functor of a row from its index.
template <class F>
inline constexpr bool kMadeForRow = requires(const F& functor) { functor(int64_t{}); };

// Programs are copied to the GPU by value: members are pointers and numbers.
template <class P>
concept PlainProgram = std::is_trivially_copyable_v<P> && requires { typename P::value_type; };

template <class P, class R>
concept RowProgramOn = PlainProgram<P> && requires(const P& program, R& row) { program.row(row); };

// Whether row() itself adds to the column sums, by sums_and_columns().
template <class Program>
inline constexpr bool kColumnsInRow = requires { requires Program::kColumnsInRow; };

template <class P, class R>
concept ColumnProgramOn =
    PlainProgram<P> && requires(const P& program, R& row, int64_t column,
                                const Array<typename P::value_type, P::kSums>& sums) {
      program.column_sums(row);
      program.finish(column, sums);
    };

}  // namespace APEX_BACKEND_NS
}  // namespace apex
