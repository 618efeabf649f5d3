// rowwise: run a program on every row of matrices [rows, columns].
//
// A program has `value_type`, the type it computes in, and `template <class R> void row(R&) const`,
// written in the order of the formula against what Row offers:
//
//   auto x = row.stage(input);                      // this row, to be read several times
//   T mean = row.sum([](T x) { return x; }, x) / row.columns();
//   T var = row.sum([=](T x) { return (x - mean) * (x - mean); }, x) / row.columns();
//   row.each([=](T& y, T x, T w) { y = (x - mean) * rstd * w; },
//            row.out(output), x, row.shared(weight));
//   row.once([&] { means[row.index()] = mean; });
//
// row_concepts.h lists what a row offers. A program that stages says what the narrowest is of that,
// `using staged_type = S;`: a GPU keeps it in packs of 16 bytes. A program to which all rows are
// alike may ask the CPU for several at once, by a constant kRowsAtOnce: see several_rows_cpu.h.
#pragma once

#include "apex/core/config.h"

#if defined(APEX_GPU)
#include "apex/engine/rowwise_gpu.h"
#else
#include "apex/engine/several_rows_cpu.h"
#endif

namespace apex {
inline namespace APEX_BACKEND_NS {

static_assert(RowOf<Row<float>, float> && RowOf<Row<double>, double>);

}  // namespace APEX_BACKEND_NS
}  // namespace apex
