// Sums of a column around a number near its mean, in one pass without a division for each element.
//
//   d = x - pivot,  mean = pivot + mean(d),  var = mean(d^2) - mean(d)^2
//
// E[x^2] - E[x]^2 loses every digit once the mean is 10^4 standard deviations.
#pragma once

#include "apex/core/storage.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class T>
APEX_HD T median(T a, T b, T c) {
  T low = a < b ? a : b, high = a < b ? b : a;
  T upper = high < c ? high : c;
  return low > upper ? low : upper;
}

// The median of three of a column's rows, of which one may lie in a border of zeros.
template <class T, class X>
APEX_HD T column_pivot(const X* x, int64_t rows, int64_t columns, int64_t column) {
  auto at = [&](int64_t row) { return convert<T>(x[row * columns + column]); };
  return median(at(rows / 4), at(rows / 2), at(rows - 1 - rows / 4));
}

// Adds d and its square.
struct AddAround {
  template <class T>
  APEX_HD void operator()(Array<T, 2>& sums, T x, T pivot) const {
    T d = x - pivot;
    sums[0] += d;
    sums[1] += d * d;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
