// foreach_reduce: one number per tensor of a list, and one for the whole list.
//
//   foreach_reduce<BFloat16>(context, table, L2Norm<float>{...}, per_tensor, total);
//
// The functor has `value_type`, `T operator()(T x) const` (the term of one element),
// `static combine(a, b)` with identity 0 (a sum, or a maximum of values >= 0), and `finish(x)`
// (applied to the combined terms: a root, say). Optionally `flag`: set to 1 where a partial result is
// not finite. Partial results are per chunk of fixed size and combined in order: the result depends
// neither on the number of threads nor on timing.
//
// `per_tensor` [tensors of the table] may be null; `total` is one number. Both are float or double as
// value_type says.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#include "apex/engine/foreach_reduce_gpu.h"
#else
#include "apex/engine/foreach_reduce_cpu.h"
#endif
