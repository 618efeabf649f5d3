// foreach: apply an element functor to every element of lists of tensors, in one launch.
//
//   foreach<InOut<P>, In<P>, InOut<float>, InOut<float>>(context, table, AdamStep{...});
//
// The functor has `value_type` and operator()(T& column0, T& column1, ...). The engine loads a pack
// of every column, applies the functor to each lane and stores the written columns. A functor that
// returns an int reports a condition: a non-zero result anywhere sets *functor.flag to 1. One with
// for_tensor(i) returns there the functor for row i of the table: a learning rate per tensor, say.
// One with generator() is given a number made from the element's index first: random bits, say.
#pragma once

#include "apex/core/config.h"

#if defined(APEX_GPU)
#include "apex/engine/foreach_gpu.h"
#else
#include "apex/engine/foreach_cpu.h"
#endif
