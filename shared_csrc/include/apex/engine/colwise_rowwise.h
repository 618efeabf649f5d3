// colwise_rowwise: for every matrix [rows, columns] of a batch sums over its columns, from these
// what groups of columns side by side have in common, and then its rows, which need that.
//
// Beside `value_type`, `matrix_type` and `kSums`, a program has
//   kVectors, kBefore          how many numbers each column has; column_sums() needs the first ones
//   vectors                    these, ColumnVectors set by the engine: row.shared(vectors[k])
//   group_columns()            how many columns a group has
//   of_sample(sample)          the program of one matrix, whose vectors begin with that matrix's;
//                              rows count on through the batch
//   before(column)             its first kBefore numbers
//   column_sums(row)           as of colwise
//   statistics(team, group, matrix)        two numbers of a group, in double, from
//       matrix.sums(column), matrix.before(column), and team.sum<N>(begin, end, f), which adds up
//       Array<double, N> f(column)
//   keep(team, group, statistics, matrix)  stores results of a group, with team.each(begin, end, f)
//                                          and team.once(f)
//   after(column, before, statistics)      the other numbers of a column
//   row(row)                   as of rowwise, with one each(), for any rows
// Sums are added in a fixed order that depends on shapes alone.
#pragma once

#include "apex/engine/colwise.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class P>
concept SampleProgram = PlainProgram<P> && requires(P program, int64_t index) {
  { program.of_sample(index) } -> std::same_as<P>;
  { program.group_columns() } -> std::same_as<int64_t>;
  program.vectors = ColumnVectors<typename P::value_type>{};
  {
    program.after(index, program.before(index), Array<double, 2>{})
  } -> std::same_as<Array<typename P::value_type, P::kVectors - P::kBefore>>;
  typename P::matrix_type;
  P::kSums;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/colwise_rowwise_gpu.h"
#else
#include "apex/engine/colwise_rowwise_cpu.h"
#endif
