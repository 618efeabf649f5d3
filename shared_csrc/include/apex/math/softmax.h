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

// Of a row's numbers x: the largest, the sum of exp(x - largest), and the sum of each other(x)
// behind them. The largest is no less than the lowest float: else -inf - -inf would be NaN.
template <class T, class R, class View, class... Others>
APEX_HD Array<T, 2 + sizeof...(Others)> sums_of_exponentials(const R& row, const View& view,
                                                             const Others&... others) {
  constexpr int N = 2 + sizeof...(Others);
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  using State = Array<T, N>;
#if defined(APEX_CPU)
  // Merging the states of lanes takes longer than a second pass over a short row.
  constexpr int64_t kShort = 512;
  if (row.columns() <= kShort) {
    const T largest = larger(row.max([](T x) { return x; }, view), kLowest);
    const Array<T, N - 1> sums = row.template sums<N - 1>(
        [=](T x) { return Array<T, N - 1>{{exponential_no_overflow(x - largest), others(x)...}}; },
        view);
    State result{{largest}};
    for (int n = 1; n < N; ++n) result[n] = sums[n - 1];
    return result;
  }
#endif
  // One exp serves both cases: of the old sum where x is the new maximum, else of x.
  auto add = [=](State& state, T x) {
    const T e = exponential_no_overflow(-std::fabs(x - state[0]));
    const T terms[] = {T(0), T(0), others(x)...};
    for (int n = 2; n < N; ++n) state[n] += terms[n];
    state[1] = x > state[0] ? state[1] * e + T(1) : state[1] + e;
    state[0] = larger(x, state[0]);
  };
  auto merge = [](const State& a, const State& b) {
    const T e = exponential_no_overflow(-std::fabs(a[0] - b[0]));
    State result;
    for (int n = 2; n < N; ++n) result[n] = a[n] + b[n];
    result[0] = larger(a[0], b[0]);
    result[1] = a[0] > b[0] ? b[1] * e + a[1] : a[1] * e + b[1];
    return result;
  };
  return row.template fold<N>(State{{kLowest}}, add, merge, view);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
