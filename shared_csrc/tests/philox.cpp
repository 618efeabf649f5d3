// Known answers of Philox4x32-10 (Random123's kat_vectors), and that every way of drawing numbers
// draws the same.
#include "apex/math/philox.h"

#include <cstdio>
#include <initializer_list>

using namespace apex;

namespace {

int failures = 0;

void expect(const Array<uint32_t, 4>& actual, const Array<uint32_t, 4>& expected) {
  for (int i = 0; i < 4; ++i) {
    if (actual[i] == expected[i]) continue;
    std::printf("word %d: expected %08x, got %08x\n", i, expected[i], actual[i]);
    ++failures;
  }
}

template <int N, class T>
void expect_same(uint64_t key, uint64_t first) {
  T together[N];
  UniformNumbers{key}.fill(first, together);
  for (int i = 0; i < N; ++i) {
    T alone[1];
    UniformNumbers{key}.fill(first + static_cast<uint64_t>(i), alone);
    if (together[i] == alone[0] && alone[0] >= 0 && alone[0] < 1) continue;
    std::printf("%d numbers from %llu: %d differs\n", N, static_cast<unsigned long long>(first), i);
    ++failures;
  }
}

// Runs, groups and single halves are the same.
void expect_same_halves(uint64_t key, uint64_t first) {
  constexpr int kRun = RandomHalves::kRun;
  const RandomHalves halves{key, 7, 3};
  uint16_t together[kRun], group[8];
  halves.fill(first, together);
  for (int i = 0; i < kRun; ++i) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    if (i % 8 == 0) halves.fill(index, group);
    if (together[i] == halves.at(index) && together[i] == group[i % 8]) continue;
    std::printf("half %d from %llu differs\n", i, static_cast<unsigned long long>(first));
    ++failures;
  }
}

}  // namespace

int main() {
  constexpr uint32_t kOnes = 0xffffffffu;
  expect(philox({{0, 0, 0, 0}}, 0, 0), {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  expect(philox({{kOnes, kOnes, kOnes, kOnes}}, kOnes, kOnes),
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  expect(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  // The counter's lower word overflows at 2^34 numbers.
  for (uint64_t first : {uint64_t{0}, uint64_t{4}, (uint64_t{1} << 34) - 8, uint64_t{1} << 45}) {
    for (uint64_t key : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x299f31d0a4093822}}) {
      expect_same<4, float>(key, first);
      expect_same<16, float>(key, first);
      expect_same<64, float>(key, first);
      expect_same<64, double>(key, first);
      expect_same_halves(key, first / RandomHalves::kRun * RandomHalves::kRun);
    }
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
