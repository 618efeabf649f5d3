// foreach_reduce: one number per tensor of a list, and one for the whole list.
//
//   foreach_reduce<BFloat16>(context, table, L2Norm<float>{...}, per_tensor, total);
//
// The functor has `value_type`, `T operator()(T x) const` (the term of one element; that of 0 is
// 0), `static combine(a, b)` with identity 0 (a sum, or a maximum of values >= 0) for value_type
// and double, and `finish(x)` (applied to the combined terms: a root, say). Optionally
//
// - `flag`: set to 1, unless null, where a partial result is not finite;
// - `static is_reliable(partial)` and `wide()`: a chunk whose partial result is not reliable is
// done
//   again with the functor wide(), which computes in double.
//
// Runs of a few dozen terms are combined in value_type, everything beyond in double. Chunks are of
// fixed size and combined in order: the result depends neither on the number of threads nor on
// timing. Tensors without elements count as 0.
//
// `per_tensor` [tensors of the table] or `total`, one number, may be null. Both are float or
// double.
#pragma once

#include <cstdint>

#include "apex/core/config.h"

namespace apex {

// Elements per partial result.
inline constexpr int64_t kReduceChunk = 65536;

}  // namespace apex

#if defined(APEX_GPU)
#include "apex/engine/foreach_reduce_gpu.h"
#else
#include "apex/engine/foreach_reduce_cpu.h"
#endif
