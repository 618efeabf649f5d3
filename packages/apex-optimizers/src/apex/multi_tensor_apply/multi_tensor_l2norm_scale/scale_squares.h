// A scaled copy, and the sum of squares of what was copied, one element at a time; then the norms.
#pragma once

#include <cmath>

#include "apex/core/types.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {

template <class T>
struct ScaleSquares {
  using value_type = T;

  T scale;

  APEX_HD void operator()(double (&squares)[1], T& in, T& out) const {
    out = in * scale;
    squares[0] = static_cast<double>(in) * static_cast<double>(in);
  }
};

// The only row is a list's sums of squares: their roots, and that of all.
template <class R>
struct RootsOfSquares {
  using value_type = double;

  const double* squares;  // [tensors]
  R* norm;                // one number
  R* norms;               // [tensors], or null
  int* flag;              // becomes 1 where the sum of all is not finite

  template <class Row>
  APEX_HD void row(Row& row) const {
    const double total = row.sum([](double square) { return square; }, row.in(squares));
    row.once([&] {
      *norm = static_cast<R>(std::sqrt(total));
      if (!is_finite(total)) *flag = 1;
    });
    if (norms == nullptr) return;
    row.each([](double& root, double square) { root = std::sqrt(square); }, row.out(norms),
             row.in(squares));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
