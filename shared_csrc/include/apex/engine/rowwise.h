// rowwise: run a program on every row of matrices [rows, columns].
//
// A program has `value_type`, the type it computes in, and `template <class R> void row(R&) const`,
// written in the order of the formula against what Row offers:
//
//   auto x = row.stage(0, input);                   // this row, converted once; needs kStages >= 1
//   T mean = row.sum([](T x) { return x; }, x) / row.columns();
//   T var = row.sum([=](T x) { return (x - mean) * (x - mean); }, x) / row.columns();
//   row.each([=](T& y, T x, T w) { y = (x - mean) * rstd * w; },
//            row.out(output), x, row.shared(weight));
//   row.once([&] { means[row.index()] = mean; });
//
// row.in(matrix) reads a row without staging (of a matrix with gaps between rows: row.in(matrix,
// stride), and row.out(matrix, stride) writes one; read or written by a long functor:
// row.ahead(view)), row.max and row.sums<N> reduce,
// row.stage_result stages what an `each` writes, row.fold reduces several numbers that depend on
// each other, row.at repeats an `each` for one column, and every functor sees numbers of type T. A
// functor of `each` gets its arguments by reference where it writes them. Programs are copied to
// the GPU by value: members are pointers and numbers.
#pragma once

#include "apex/core/config.h"

#if defined(APEX_GPU)
#include "apex/engine/rowwise_gpu.h"
#else
#include "apex/engine/rowwise_cpu.h"
#endif
