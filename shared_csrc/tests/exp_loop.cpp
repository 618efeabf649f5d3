// The loop whose assembly test_exp.py inspects: an engine's pack of exponentials.
#include "apex/core/pack.h"
#include "apex/math/exp.h"

void exponential_pack(const float (&x)[apex::kPack], float (&y)[apex::kPack]) {
  APEX_VECTORIZE
  for (int lane = 0; lane < apex::kPack; ++lane) {
    y[lane] = apex::exponential(x[lane]) + apex::exponential_no_overflow(-x[lane]);
  }
}
