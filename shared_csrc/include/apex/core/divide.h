// Indices of several dimensions from one number, and that of a row's first random number.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// a / n, and a % n in `rest`, for a >= 0 and n > 0. A division of 64 bits takes as long as a short
// row on a CPU, and a hundred instructions on a GPU; numbers are hardly ever that large.
APEX_HD int64_t divide(int64_t a, int64_t n, int64_t& rest) {
  if (((a | n) >> 32) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(n);
    rest = static_cast<uint32_t>(a) - quotient * static_cast<uint32_t>(n);
    return quotient;
  }
  const int64_t quotient = a / n;
  rest = a - quotient * n;
  return quotient;
}

// The index of a row's first random number. Rows begin at multiples of 4, as many as random
// generators make at once.
APEX_HD uint64_t first_number(int64_t row, int64_t columns) {
  return static_cast<uint64_t>(row) * ((static_cast<uint64_t>(columns) + 3) / 4 * 4);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
