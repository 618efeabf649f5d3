// Loads and stores parts of packs, of every length and storage type, from memory that is exactly as
// long; exits non-zero with a line per mismatch. AddressSanitizer watches the ends.
#include <memory>

#include "apex/core/pack.h"
#include "checks.h"

namespace {

template <class S>
void test_length(int count) {
  using T = compute_t<S>;
  // Exactly as long: no reserve behind the end, as a vector of a grown capacity would have.
  std::unique_ptr<S[]> source(new S[count]), target(new S[count]);
  for (int i = 0; i < count; ++i) source[i] = convert<S>(static_cast<T>(i % 13 + 1));
  T values[kPack];
  std::fill_n(values, kPack, T(-1));
  load_groups(source.get(), values, count);
  std::string where = std::to_string(sizeof(S)) + " bytes, length " + std::to_string(count);
  for (int i = 0; i < kPack; ++i) {
    double expected = i < count ? i % 13 + 1 : i < round_to_groups(count) ? 0 : -1;
    expect_near(values[i], expected, 0, "load_groups " + where);
  }
  for (int i = 0; i < kPack; ++i) values[i] = static_cast<T>(i % 7 + 0.5);
  store_groups(target.get(), values, count);
  for (int i = 0; i < count; ++i) {
    expect_near(convert<T>(target[i]), i % 7 + 0.5, 0, "store_groups " + where);
  }
}

// What bfloat16 must round: halfway cases to even, NaNs, infinities, the largest numbers.
void test_rounding() {
  const uint32_t cases[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x7f800000, 0xff800000, 0x7f800001,
                            0xffc12345, 0x7f7fffff, 0x00000001, 0x80008000, 0x00000000, 0x807fffff};
  constexpr int kCases = sizeof(cases) / sizeof(cases[0]);
  alignas(64) float values[kGroup] = {};
  for (int i = 0; i < kCases; ++i) values[i] = bit_cast<float>(cases[i]);
  BFloat16 stored[kCases];
  store_groups(stored, values, kCases);
  for (int i = 0; i < kCases; ++i) {
    expect_near(stored[i].bits, to_bfloat16(values[i]).bits, 0, "rounding " + std::to_string(i));
  }
}

}  // namespace

int main() {
  for (int count = 1; count <= kPack; ++count) {
    test_length<float>(count);
    test_length<double>(count);
    test_length<Half>(count);
    test_length<BFloat16>(count);
    test_length<Float8>(count);
  }
  test_rounding();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
