// bfloat16 elements two at a time on the CPU, as the halves of a 32-bit word.
//
// Widening them one by one takes shuffles, for which processors have few units. Of a word, the
// second element is a mask and the first a shift away. Lanes are then in another order, slots:
// first all even elements of a pack, then all odd ones.
#pragma once

#include <bit>

#include "apex/core/pack.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Element 2 * word or, with kOdd, the next one. `elements` need not be aligned to words.
template <bool kOdd>
APEX_HD float half_of_word(const BFloat16* elements, int word) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t bits;
  memcpy(&bits, elements + 2 * word, sizeof(bits));
  return bit_cast<float>(kOdd ? bits & 0xffff0000u : bits << 16);
}

// Both elements of a word, rounded as by to_bfloat16().
APEX_HD void store_word(BFloat16* elements, int word, float even, float odd) {
  uint32_t low = bit_cast<uint32_t>(even), high = bit_cast<uint32_t>(odd);
  low = (low + 0x7fffu + ((low >> 16) & 1u)) >> 16;
  high = high + 0x7fffu + ((high >> 16) & 1u);
  low = even != even ? 0x7fc0u : low;
  high = odd != odd ? 0x7fc00000u : high;
  uint32_t bits = low | (high & 0xffff0000u);
  memcpy(elements + 2 * word, &bits, sizeof(bits));
}

// A pack of numbers that lie by slot, put in order of elements.
template <class T>
void order_pairs(T* numbers) {
  T slots[kPack];
  memcpy(slots, numbers, sizeof(slots));
  for (int word = 0; word < kPack / 2; ++word) {
    numbers[2 * word] = slots[word];
    numbers[2 * word + 1] = slots[word + kPack / 2];
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
