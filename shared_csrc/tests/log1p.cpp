// Compares log1p_of_unit() with log1p() in double over floats from 0 to 1; prints the largest error
// in units in the last place.
#include "apex/math/log1p.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

using namespace apex;

// Argument: the step between the bits of tested floats.
int main(int, char** arguments) {
  const uint32_t step = std::strtoul(arguments[1], nullptr, 10), one = bit_cast<uint32_t>(1.0f);
  double worst = 0;
  for (uint64_t bits = 0; bits <= one;
       bits = bits == one ? bits + 1 : std::min<uint64_t>(bits + step, one)) {
    const float x = bit_cast<float>(static_cast<uint32_t>(bits));
    if (x < 1e-37f && x != 0) continue;  // x / 2 is subnormal
    const double truth = std::log1p(static_cast<double>(x));
    int exponent;
    std::frexp(truth, &exponent);
    const double error = std::fabs(log1p_of_unit(x) - truth);
    if (!(error <= worst * std::ldexp(1.0, exponent - 24)))
      worst = error / std::ldexp(1.0, exponent - 24);
  }
  std::printf("%.4f\n", worst);
  return std::isnan(log1p_of_unit(NAN)) ? 0 : 1;
}
