// colwise: reduce every column of matrices [rows, columns]; rowwise_colwise: a row program and a
// column reduction over the same operands, in one pass on the CPU.
//
// Beside `value_type`, a column program has
//   using matrix_type = S;                             // its matrices' narrowest, unless staged
//   static constexpr int kSums;                        // numbers accumulated per column
//   template <class R> void column_sums(R& row) const  // adds one row:
//     { row.template accumulate<kSums>([=](Array<T, kSums>& sums, T dy, T x) { sums[0] += ...; },
//                                      row.in(dy), row.in(x)); }
//     where a functor needs numbers of its row, [=](int64_t index) makes it
//   void finish(int64_t column, const Array<T, kSums>& sums) const   // stores the result
// and, where parts do not simply add up (Welford), merge(Array& total, const Array& part) const,
// of value_type and of double: a GPU merges threads in double. finish() may take double, too.
// The functor may write a result, row.out(y), as that of a row's `each`.
// Sums start at zero and are merged in a fixed order: the same input and thread count give the same
// bits.
#pragma once

#include "apex/core/config.h"
#include "apex/engine/rowwise.h"

#if defined(APEX_GPU)
#include "apex/engine/colwise_gpu.h"
#else
#include "apex/engine/colwise_cpu.h"
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

// rowwise_colwise(), or rowwise() where nobody wants the sums.
template <class Context, class Program>
void rowwise_colwise(const Context& context, int64_t rows, int64_t columns, bool with_sums,
                     const Program& program) {
  if (with_sums) {
    rowwise_colwise(context, rows, columns, program);
  } else {
    rowwise(context, rows, columns, program);
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
