// A float32 as a bfloat16 and the 16 bits of it that the bfloat16 lacks.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// `high` holds a bfloat16 and `remainder` a 16-bit integer, the lower half of the float32. Where
// that is negative, the bfloat16 was rounded up.
APEX_HD float join_remainder(float high, float remainder) {
  int32_t low = static_cast<int32_t>(remainder);
  uint32_t upper = bit_cast<uint32_t>(high) - (low < 0 ? 0x10000u : 0u);
  return bit_cast<float>(upper | (static_cast<uint32_t>(low) & 0xffffu));
}

// Ties are rounded away from zero. A NaN stays one.
APEX_HD void split_remainder(float value, float& high, float& remainder) {
  uint32_t bits = bit_cast<uint32_t>(value);
  int32_t rest = static_cast<int16_t>(bits & 0xffffu);
  uint32_t rounded = (bits & 0xffff0000u) + (rest < 0 ? 0x10000u : 0u);
  bool is_nan = value != value;
  high = bit_cast<float>(is_nan ? 0x7fc00000u : rounded);
  remainder = static_cast<float>(is_nan ? 0 : rest);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
