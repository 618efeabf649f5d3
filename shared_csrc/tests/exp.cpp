// Compares exponential() and exponential_no_overflow() with exp() in double, over floats of every
// exponent; prints the largest error in units in the last place, and a line for whatever is wrong.
#include "apex/math/exp.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

using namespace apex;

namespace {

constexpr int kBatch = 4096;
constexpr double kSmallestNormal = 1.1754943508222875e-38;
constexpr double kOverflow = 3.4028235677973366e38;  // rounds to infinity from here on

double worst_ulps = 0;
float worst_at = 0;
long failures = 0;

void fail(const char* what, float x, float actual) {
  if (++failures <= 20) std::printf("%s: exp(%a) gave %a\n", what, x, actual);
}

void check(const char* what, float x, float actual) {
  double truth = std::exp(static_cast<double>(x));
  if (std::isnan(x)) {
    if (!std::isnan(actual)) fail(what, x, actual);
  } else if (truth < kSmallestNormal) {
    if (actual != 0 || std::signbit(actual)) fail(what, x, actual);
  } else if (truth >= kOverflow) {
    if (!(actual == std::numeric_limits<float>::infinity())) fail(what, x, actual);
  } else {
    int exponent;
    std::frexp(truth, &exponent);
    double ulps = std::fabs(actual - truth) / std::ldexp(1.0, exponent - 24);
    if (!(ulps <= worst_ulps)) worst_ulps = ulps, worst_at = x;
  }
}

void check_batch(const float (&x)[kBatch]) {
  float any[kBatch], bounded[kBatch];
  for (int i = 0; i < kBatch; ++i) any[i] = exponential(x[i]);
  for (int i = 0; i < kBatch; ++i) bounded[i] = exponential_no_overflow(x[i]);
  for (int i = 0; i < kBatch; ++i) {
    check("exponential", x[i], any[i]);
    if (!(x[i] > 88.0f)) check("exponential_no_overflow", x[i], bounded[i]);
  }
}

// Floats whose bits are first, first + step, ... up to last.
void check_range(uint64_t first, uint64_t last, uint64_t step) {
  float x[kBatch] = {};
  int count = 0;
  for (uint64_t bits = first; bits <= last; bits += step) {
    x[count++] = bit_cast<float>(static_cast<uint32_t>(bits));
    if (count == kBatch || bits + step > last) {
      check_batch(x);
      count = 0;
    }
  }
}

}  // namespace

// Argument: the step between the bits of tested floats; 1 tests all 2^32.
int main(int, char** arguments) {
  check_range(0, 0xffffffffu, std::strtoull(arguments[1], nullptr, 10));
  for (float edge :
       {kSmallestExponent, kLargestExponent, 0.0f, -0.0f, 0.34657359f, -103.97f,
        std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    uint64_t bits = bit_cast<uint32_t>(edge);
    check_range(bits < 20000 ? 0 : bits - 20000, bits + 20000, 1);
  }
  for (int i = 0; i <= 200; ++i) {
    double x = -745 + i * 7.25, truth = std::exp(x);
    if (exponential(x) != truth || exponential_no_overflow(x) != truth) fail("double", x, 0);
  }
  std::printf("%.4f ulp at %.9g\n%ld failures\n", worst_ulps, worst_at, failures);
  return failures == 0 ? 0 : 1;
}
