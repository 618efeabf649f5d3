// colwise_rowwise: for every matrix [rows, columns] of a batch, sums over its columns, and then its
// rows, which need them.
//
// Beside `value_type` and `kSums`, a program has
//   of_sample(sample)          the program of one matrix, whose vectors begin with that matrix's;
//                              rows count on through the batch
//   before(group)              makes what column_sums() needs, see samplewise.h
//   column_sums(row)           as of colwise
//   between(group, sums)       makes what row() needs; sums(column) are one column's, in double
//   row(row)                   as of rowwise
// Sums are added in a fixed order that depends on shapes alone.
#pragma once

#include "apex/engine/colwise.h"
#include "apex/engine/samplewise.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class P>
concept SampleProgram = RowProgram<P> && requires(const P& program, int64_t sample) {
  { program.of_sample(sample) } -> std::same_as<P>;
  P::kSums;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/colwise_rowwise_gpu.h"
#else
#include "apex/engine/colwise_rowwise_cpu.h"
#endif
