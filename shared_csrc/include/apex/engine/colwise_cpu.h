// Column programs on the CPU, alone or in the same pass as a row program.
#pragma once

#include "apex/engine/rowwise_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Rows accumulated into one buffer before it is merged into the thread's total: bounds the error.
inline constexpr int64_t kRowsPerMerge = 128;

template <class Program, class T, int N>
void merge_sums(const Program& program, Array<T, N>& total, const Array<T, N>& part) {
  if constexpr (requires { program.merge(total, part); }) {
    program.merge(total, part);
  } else {
    for (int n = 0; n < N; ++n) total[n] += part[n];
  }
}

// total[:, column] := merge(total, part) for all columns; part is zeroed for its next use.
template <class Program, class T>
void merge_buffers(const Program& program, T* total, T* part, int64_t columns) {
  constexpr int N = Program::kSums;
  APEX_VECTORIZE
  for (int64_t column = 0; column < columns; ++column) {
    Array<T, N> a, b;
    for (int n = 0; n < N; ++n) a[n] = total[n * columns + column];
    for (int n = 0; n < N; ++n) b[n] = part[n * columns + column];
    merge_sums(program, a, b);
    for (int n = 0; n < N; ++n) total[n * columns + column] = a[n];
    for (int n = 0; n < N; ++n) part[n * columns + column] = T(0);
  }
}

template <bool kRows, class Context, class Program>
void run_colwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  using T = typename Program::value_type;
  constexpr int N = Program::kSums;
  int64_t wanted = rows * columns / kRowwiseGrain;
  int64_t parts = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(context.threads(), 1024));
  // Per part: totals [N, columns], the current block's sums [N, columns]. One part more for the
  // empty result when there are no rows.
  std::unique_ptr<T[]> buffers(new T[parts * 2 * N * columns]());
  auto totals_of = [&](int64_t part) { return buffers.get() + part * 2 * N * columns; };

  context.parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    std::unique_ptr<T[]> scratch(new T[stages_of<Program>() * columns]);
    for (int64_t part = first; part < last; ++part) {
      T* totals = totals_of(part);
      T* block = totals + N * columns;
      Row<T> row(columns, scratch.get(), block);
      int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
      for (int64_t index = begin; index < end; ++index) {
        row.move_to(index);
        if constexpr (kRows) program.row(row);
        program.column_sums(row);
        bool full = (index - begin + 1) % kRowsPerMerge == 0 || index + 1 == end;
        if (full) merge_buffers(program, totals, block, columns);
      }
    }
  });
  int64_t grain = std::max<int64_t>(1, kRowwiseGrain / parts);
  context.parallel_for(0, columns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      Array<T, N> sums;
      for (int n = 0; n < N; ++n) sums[n] = totals_of(0)[n * columns + column];
      for (int64_t part = 1; part < parts; ++part) {
        Array<T, N> other;
        for (int n = 0; n < N; ++n) other[n] = totals_of(part)[n * columns + column];
        merge_sums(program, sums, other);
      }
      program.finish(column, sums);
    }
  });
}

template <class Context, class Program>
void colwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  run_colwise<false>(context, rows, columns, program);
}

template <class Context, class Program>
void rowwise_colwise(const Context& context, int64_t rows, int64_t columns,
                     const Program& program) {
  run_colwise<true>(context, rows, columns, program);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
