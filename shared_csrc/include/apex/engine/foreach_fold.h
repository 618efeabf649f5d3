// foreach_fold: foreach that also adds up K terms of every element, per tensor.
//
//   foreach_fold<2, In<P>, In<P>, InOut<M>>(context, table, functor, sums);
//
// The functor has `value_type` and operator()(double (&terms)[K], T& column0, T& column1, ...),
// which sets the terms of one element: the norms of a parameter and of its update, say, while the
// moments are updated. `sums` [tensors of the table, K] receives the sums, or with a
// `static double combine(a, b)` of the functor what that makes of the terms. With prepare(), skip()
// and for_tensor() it is as in foreach; where nothing is done `sums` is left as it was.
//
// Chunks are of fixed size and added in order: sums depend neither on the number of threads nor on
// timing. Tensors without elements have sums 0.
#pragma once

#include <cstdint>

#include "apex/core/config.h"

namespace apex {

// Elements per partial sum.
inline constexpr int64_t kFoldChunk = 65536;

}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/foreach_fold_gpu.h"
#else
#include "apex/engine/foreach_fold_cpu.h"
#endif
