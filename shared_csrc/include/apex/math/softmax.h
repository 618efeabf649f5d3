// The largest number of a row and the sum of exponentials, in one pass with a running maximum:
// Milakov & Gimelshein 2018 (https://arxiv.org/abs/1805.02867).
#pragma once

#include <cmath>
#include <limits>

#include "apex/math/exp.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// For Row::fold, whose state has N numbers: the maximum, sum(exp(x - max)), and others' behind
// them.
template <class T, int N = 2>
struct SumOfExponentials {
  using State = Array<T, N>;

  // Below every float but -inf, so that a difference to it is never NaN.
  static APEX_HD State empty() { return {{std::numeric_limits<T>::lowest()}}; }

  // One exp serves both cases: of the old sum where x is the new maximum, else of x.
  static APEX_HD void add(State& state, T x) {
    T max = state[0], sum = state[1];
    T e = exponential_no_overflow(-std::fabs(x - max));
    state[1] = x > max ? sum * e + T(1) : sum + e;
    state[0] = x > max ? x : max;
  }

  static APEX_HD State merge(const State& a, const State& b) {
    bool a_is_max = a[0] > b[0];
    T e = exponential_no_overflow(-std::fabs(a[0] - b[0]));
    State result{};
    result[0] = a_is_max ? a[0] : b[0];
    result[1] = a_is_max ? b[1] * e + a[1] : a[1] * e + b[1];
    return result;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
