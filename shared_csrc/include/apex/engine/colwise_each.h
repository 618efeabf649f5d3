// columns_each: a row program with one each(), for rows of a matrix [rows, columns] that share
// vectors. On a GPU a thread keeps its columns' numbers of these for many rows.
//
// colwise_each: sums over every column of the matrix, by a column program, and then the same. The
// row program takes the sums from where finish() stored them, or from vectors [columns] that
// its with_sums(vectors) is given.
#pragma once

#include "apex/engine/colwise.h"

#if defined(APEX_GPU)
#include "apex/engine/colwise_each_gpu.h"
#else

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class Context, class Rows>
void columns_each(const Context& context, int64_t rows, int64_t columns, const Rows& each) {
  rowwise(context, rows, columns, each);
}

template <class Context, class Sums, class Rows>
void colwise_each(const Context& context, int64_t rows, int64_t columns, const Sums& sums,
                  const Rows& each) {
  colwise(context, rows, columns, sums);
  columns_each(context, rows, columns, each);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex

#endif
