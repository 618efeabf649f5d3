// The loops whose assembly test_exp.py inspects: an engine's packs of exponentials and logarithms.
#include "apex/core/pack.h"
#include "apex/math/exp.h"
#include "apex/math/log1p.h"

void exponential_pack(const float (&x)[apex::kPack], float (&y)[apex::kPack]) {
  APEX_VECTORIZE
  for (int lane = 0; lane < apex::kPack; ++lane) {
    y[lane] = apex::exponential(x[lane]) + apex::exponential_no_overflow(-x[lane]);
  }
}

void log1p_pack(const float (&x)[apex::kPack], float (&y)[apex::kPack]) {
  APEX_VECTORIZE
  for (int lane = 0; lane < apex::kPack; ++lane) y[lane] = apex::log1p_of_unit(x[lane]);
}
