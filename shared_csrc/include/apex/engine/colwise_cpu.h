// Column programs on the CPU, alone or in the same pass as a row program.
#pragma once

#include "apex/engine/several_rows_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

static_assert(ColumnRowOf<Row<float>, float, 2>);

template <class P>
concept ColumnProgram = ColumnProgramOn<P, Row<typename P::value_type>>;

template <class Program, class T>
concept HasMerge =
    requires(const Program& program, Array<T, Program::kSums>& sums) { program.merge(sums, sums); };

// Sums of many blocks are kept in double: in float, adding the 500th block of a column of 65,536
// rows costs more digits than everything before it.
template <class Program, class T>
using Total = std::conditional_t<HasMerge<Program, T>, T, double>;

// Rows accumulated into one buffer before it is merged into the thread's total: bounds the error.
// Of plain sums, 128 rows made that of 300 up to three times PyTorch's; 32 make it about the same,
// for 2 % of the time. Where totals are no wider than the buffer, each merge costs digits as well.
template <class Program, class T>
inline constexpr int64_t kRowsPerMerge = HasMerge<Program, T> ? 128 : 32;

// One column's numbers of `from`, which is [N, stride].
template <class T, int N, class S>
APEX_HD Array<T, N> column_of(const S* from, int64_t stride, int64_t column) {
  Array<T, N> sums;
  for (int n = 0; n < N; ++n) sums[n] = static_cast<T>(from[n * stride + column]);
  return sums;
}

// total[:, column] := merge(total, part) for columns [begin, end).
template <class Program, class S, class P>
void merge_buffers(const Program& program, S* total, const P* part, int64_t stride, int64_t begin,
                   int64_t end) {
  constexpr int N = Program::kSums;
  using T = typename Program::value_type;
  APEX_VECTORIZE
  for (int64_t column = begin; column < end; ++column) {
    if constexpr (HasMerge<Program, T>) {
      Array<T, N> a = column_of<T, N>(total, stride, column);
      program.merge(a, column_of<T, N>(part, stride, column));
      for (int n = 0; n < N; ++n) total[n * stride + column] = a[n];
    } else {
      for (int n = 0; n < N; ++n) total[n * stride + column] += part[n * stride + column];
    }
  }
}

// Adds rows [begin, end) of `rows` to `totals`, by way of `block`, which is zero before and after.
template <bool kRows, class Program, class T, class S>
void add_rows(int64_t rows, int64_t columns, int64_t begin, int64_t end, const Program& program,
              T* block, S* totals) {
  constexpr int N = Program::kSums;
  const int64_t stride = sums_stride(columns);
  auto add = [&]<class R>(R& row, int64_t first, int64_t last) __attribute__((always_inline)) {
    static_assert(kRowsPerMerge<Program, T> % R::kRows == 0);
    for (int64_t index = first; index < last;) {
      row.move_to(index);
      if constexpr (kRows) program.row(row);
      if constexpr (!kRows || !kColumnsInRow<Program>) program.column_sums(row);
      index += R::kRows;
      if ((index - first) % kRowsPerMerge<Program, T> != 0 && index != last) continue;
      row.order_sums(N);
      merge_buffers(program, totals, block, stride, 0, columns);
      std::fill_n(block, N * stride, T(0));
    }
  };
  by_rows_at_once<Program>(rows, columns, block, begin, end, add);
}

template <bool kRows, class Context, class Program>
void run_colwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  using T = typename Program::value_type;
  using S = Total<Program, T>;
  constexpr int N = Program::kSums;
  const int64_t stride = sums_stride(columns);
  int64_t wanted = rows * columns / kRowwiseGrain;
  int64_t parts = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(context.threads(), 1024));
  auto totals = zero_sums<S>(parts * N * stride);
  auto totals_of = [&](int64_t part) { return totals.get() + part * N * stride; };

  context.parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    auto block = zero_sums<T>(N * stride);
    for (int64_t part = first; part < last; ++part) {
      add_rows<kRows>(rows, columns, rows * part / parts, rows * (part + 1) / parts, program,
                      block.get(), totals_of(part));
    }
    finish_streams();
  });
  int64_t grain = std::max<int64_t>(1, kRowwiseGrain / parts);
  context.parallel_for(0, columns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < parts; ++part) {
      merge_buffers(program, totals_of(0), totals_of(part), stride, begin, end);
    }
    for (int64_t column = begin; column < end; ++column) {
      program.finish(column, column_of<T, N>(totals_of(0), stride, column));
    }
  });
}

template <class Context, ColumnProgram Program>
void colwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  run_colwise<false>(context, rows, columns, program);
}

template <class Context, class Program>
  requires RowProgram<Program> && ColumnProgram<Program>
void rowwise_colwise(const Context& context, int64_t rows, int64_t columns,
                     const Program& program) {
  run_colwise<true>(context, rows, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
