// Compares every way of rounding pairs of floats to bfloat16 with to_bfloat16(), bit for bit: all
// upper halves of a float with lower halves around those that decide, in packs of one kind and
// mixed. And loads and stores parts of two groups, of every length.
#include "apex/engine/pairs_cpu.h"

#include <cstdio>
#include <initializer_list>
#include <memory>

using namespace apex;

namespace {

constexpr uint32_t kLowerHalves[] = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};
constexpr int kWords = kPack / 2;
// Beside the pack, to see that nothing else is written.
constexpr uint16_t kUntouched = 0xabcd;

long failures = 0;

void check(const char* what, const float (&values)[kPack], const BFloat16* stored) {
  for (int i = 0; i < kPack; ++i) {
    uint16_t expected = to_bfloat16(values[i]).bits;
    if (stored[i].bits != expected && ++failures <= 20) {
      std::printf("%s: %a gave %04x instead of %04x\n", what, values[i], stored[i].bits, expected);
    }
  }
  if (stored[-1].bits != kUntouched || stored[kPack].bits != kUntouched) {
    std::printf("%s: wrote beside the pack\n", what), ++failures;
  }
}

void check_pack(const float (&values)[kPack]) {
  alignas(64) float slots[kPack];
  for (int word = 0; word < kWords; ++word) {
    slots[word] = values[2 * word];
    slots[word + kWords] = values[2 * word + 1];
  }
  alignas(64) BFloat16 memory[kPack + 64];
  auto stored_by = [&](const char* what, BFloat16* target, auto store) {
    for (auto& element : memory) element.bits = kUntouched;
    store(target);
    check(what, values, target);
  };
  BFloat16 *aligned = memory + 32, *unaligned = memory + 5;
  stored_by("store_word", unaligned, [&](BFloat16* target) {
    for (int word = 0; word < kWords; ++word) {
      store_word(target, word, slots[word], slots[word + kWords]);
    }
  });
#if defined(__AVX512BW__)
  for (bool by_instruction : {false, kRoundsBFloat16}) {
    const char* what = by_instruction ? "by instruction" : "without instruction";
    stored_by(what, unaligned,
              [&](BFloat16* target) { store_slots(target, slots, false, by_instruction); });
    stored_by(what, aligned,
              [&](BFloat16* target) { store_slots(target, slots, true, by_instruction); });
    stored_by(
        by_instruction ? "pairs by instruction" : "store_pairs", unaligned, [&](BFloat16* target) {
          for (int i = 0; i < kWords; i += kGroup) {
            store_pairs(target + 2 * i, slots + i, slots + kWords + i, 2 * kGroup, by_instruction);
          }
        });
  }
  stored_by("stream_pairs", aligned, [&](BFloat16* target) {
    for (int i = 0; i < kWords; i += kGroup) {
      stream_pairs(target + 2 * i, slots + i, slots + kWords + i);
    }
  });
#else
  (void)aligned;
#endif
  float ordered[kPack];
  memcpy(ordered, slots, sizeof(ordered));
  order_pairs<kPack>(ordered);
  if (memcmp(ordered, values, sizeof(ordered)) != 0) std::printf("order_pairs\n"), ++failures;
}

#if defined(__AVX512BW__)
// From and to memory that is exactly as long.
void check_pairs(int count) {
  std::unique_ptr<BFloat16[]> source(new BFloat16[count]), target(new BFloat16[count + 1]);
  for (int i = 0; i < count; ++i) source[i] = to_bfloat16(static_cast<float>(i + 1));
  target[count].bits = kUntouched;
  float even[kGroup], odd[kGroup];
  load_pairs(source.get(), even, odd, count);
  store_pairs(target.get(), even, odd, count);
  bool agrees = target[count].bits == kUntouched;
  for (int i = 0; i < 2 * kGroup; ++i) {
    agrees &= (i % 2 == 0 ? even : odd)[i / 2] == (i < count ? i + 1.0f : 0.0f);
    if (i < count) agrees &= target[i].bits == source[i].bits;
  }
  if (!agrees) std::printf("pairs of length %d\n", count), ++failures;
}
#endif

#if defined(__AVX512BW__)
// A constant in a loop, whose rounding compilers would like to do before it: a processor that lacks
// the instruction must not come to it.
[[gnu::noinline]] void store_constant(BFloat16* elements, int packs, float value) {
  for (int pack = 0; pack < packs; ++pack) {
    alignas(64) float slots[kPack];
    for (float& slot : slots) slot = value;
    store_slots(elements + pack * kPack, slots, false);
  }
}
#endif

}  // namespace

int main() {
#if defined(__AVX512BW__)
  for (int count = 1; count <= 2 * kGroup; ++count) check_pairs(count);
#endif
#if defined(__AVX512BW__)
  BFloat16 constants[3 * kPack];
  store_constant(constants, 3, -1.0f);
  for (BFloat16 element : constants) failures += element.bits != to_bfloat16(-1.0f).bits;
#endif
  for (uint32_t lower : kLowerHalves) {
    for (uint32_t upper = 0; upper < 0x10000; upper += kPack) {
      float alike[kPack], mixed[kPack];
      for (uint32_t i = 0; i < kPack; ++i) {
        alike[i] = bit_cast<float>((upper + i) << 16 | lower);
        mixed[i] = bit_cast<float>((((upper + i) * 40503u) & 0xffffu) << 16 | lower);
      }
      check_pack(alike);
      check_pack(mixed);
    }
  }
  std::printf("%ld failures\n", failures);
  return failures == 0 ? 0 : 1;
}
