// Softmax of a row and its gradient; and the largest number with the sum of exponentials, in one
// pass with a running maximum: Milakov & Gimelshein 2018 (https://arxiv.org/abs/1805.02867).
#pragma once

#include <cmath>
#include <limits>

#include "apex/math/exp.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Softmax of score(values...) over what a row sees: use(inverse, each_term) with each_term as of
// Row::with_terms(); a term times `inverse` is the softmax. That is 0 unless is_seen(largest
// score).
template <class T, class R, class Score, class IsSeen, class Use, class... Views>
APEX_HD void with_softmax(const R& row, const Score& score, const IsSeen& is_seen, const Use& use,
                          const Views&... views) {
  const T largest = row.max(score, views...);
  row.with_terms(
      [score, largest](const auto&... values) {
        return exponential_no_overflow(score(values...) - largest);
      },
      [&](T sum, const auto& each_term) { use(is_seen(largest) ? T(1) / sum : T(0), each_term); },
      views...);
}

// The same, written to `y`.
template <class T, class R, class Y, class Score, class IsSeen, class... Views>
APEX_HD void write_softmax(const R& row, const Y& y, const Score& score, const IsSeen& is_seen,
                           const Views&... views) {
  with_softmax<T>(
      row, score, is_seen,
      [&](T inverse, const auto& each_term) {
        each_term([inverse](T& y, T term) { y = term * inverse; }, y);
      },
      views...);
}

struct Always {
  template <class T>
  APEX_HD bool operator()(T) const {
    return true;
  }
};

// dx = factor * y * (dy - sum(y * dy)), where dy = gradient(values...) of the views behind y.
template <class T, class R, class G, class Result, class Y, class... Views>
APEX_HD void softmax_backward(const R& row, T factor, const G& gradient, const Result& dx,
                              const Y& y, const Views&... views) {
  const T sum = row.sum([gradient](T y, const auto&... values) { return gradient(values...) * y; },
                        y, views...);
  row.each(
      [factor, sum, gradient](T& dx, T y, const auto&... values) {
        dx = factor * y * (gradient(values...) - sum);
      },
      dx, y, views...);
}

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
