// What a loss needs of a chunk of logits that nobody keeps: four numbers of each row, and then the
// gradient, in the place of the logits. The classes of a row may be divided over ranks.
//
//   x = cap * tanh(product / cap), or the product itself
//   lse = max + log(sum_exp), of all ranks
//   loss = lse - (1 - s) * x[label] - s * mean(x) + z * lse^2
//   dx = dloss * ((1 + 2 z lse) * exp(x - max) / sum_exp - s / C - (1 - s) * onehot(label))
//   dproduct = dx * (1 - (x / cap)^2)
//
// z: Chowdhery et al. 2022, section 5 (https://arxiv.org/abs/2204.02311); cap: Gemma Team 2024,
// section 2 (https://arxiv.org/abs/2408.00118).
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "apex/math/quotient.h"
#include "apex/math/softmax.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// Labels [rows] of all ranks' classes, and the one of them that marks rows to be left out.
struct ChunkLabels {
  const int64_t* labels;
  int64_t classes;
  int64_t padding;

  APEX_HD int64_t at(int64_t row) const { return labels[row]; }
  APEX_HD bool is_padding(int64_t label) const { return label == padding; }
  APEX_HD bool is_class(int64_t label) const { return label >= 0 && label < classes; }
};

// tanh(x), on the CPU as (1 - t) / (1 + t) with t = exp(-2 |x|), in which compilers make vectors of
// the engine's loops. Where t is nearly 1 that loses digits: there, the power series up to x^9.
template <class T>
APEX_HD T tanh_in_loops(T x) {
#if defined(APEX_CPU)
  if constexpr (std::is_same_v<T, float>) {
    constexpr float kSmall = 0.3f;
    const float t = exponential_no_overflow(-2.0f * std::fabs(x));
    const float large = std::copysign(quotient(1.0f - t, 1.0f + t), x);
    const float s = x * x;
    float series = 62.0f / 2835.0f;
    series = series * s - 17.0f / 315.0f;
    series = series * s + 2.0f / 15.0f;
    series = series * s - 1.0f / 3.0f;
    return std::fabs(x) < kSmall ? x + x * (s * series) : large;
  }
#endif
  return std::tanh(x);
}

template <class S>
struct LogitStatistics {
  using value_type = compute_t<S>;
  using T = value_type;

  S* logits;           // [rows, columns]
  int64_t first;       // class of the first column
  ChunkLabels labels;  // [rows]
  T* maxima;           // [rows], as all that follow
  T* sums_exp;
  T* targets;  // the label's, 0 where it is another rank's
  T* means;    // sum / classes

  template <class R>
  APEX_HD void row(R& row) const {
    if (labels.is_padding(labels.at(row.index()))) return leave_out(row);
    of(row, row.ahead(row.in(static_cast<const S*>(logits))));
  }

  template <class R>
  APEX_HD void leave_out(R& row) const {
    store(row, {{T(0), T(1), T(0)}}, T(0));
  }

  template <class R, class View>
  APEX_HD void of(R& row, const View& x) const {
    const int64_t label = labels.at(row.index()), column = label - first;
    // A GPU cannot raise an error here: labels without a class give NaN.
    T target = labels.is_class(label) ? T(0) : std::numeric_limits<T>::quiet_NaN();
    if (column >= 0 && column < row.columns()) {
      target = convert<T>(logits[row.index() * row.columns() + column]);
    }
    store(row, sums_of_exponentials<T>(row, x, [](T x) { return x; }), target);
  }

  template <class R>
  APEX_HD void store(R& row, const Array<T, 3>& sums, T target) const {
    row.once([&] {
      maxima[row.index()] = sums[0];
      sums_exp[row.index()] = sums[1] + (sums[0] - sums[0]);  // NaN for inf, as in log_softmax
      targets[row.index()] = target;
      means[row.index()] = sums[2] / static_cast<T>(labels.classes);
    });
  }
};

// The same of logits that are capped in their place.
template <class S>
struct CappedLogitStatistics {
  using value_type = compute_t<S>;
  using staged_type = S;
  using T = value_type;

  LogitStatistics<S> statistics;
  T cap;

  template <class R>
  APEX_HD void row(R& row) const {
    if (statistics.labels.is_padding(statistics.labels.at(row.index()))) {
      return statistics.leave_out(row);
    }
    const T cap = this->cap, inverse = T(1) / cap;
    auto capped = [=](T& y, T x) { y = cap * tanh_in_loops(x * inverse); };
    const S* logits = statistics.logits;
    statistics.of(row, row.stage_result(statistics.logits, capped, row.ahead(row.in(logits))));
  }
};

template <class S, bool kCapped>
struct LogitGradients {
  using value_type = compute_t<S>;
  using T = value_type;

  S* logits;  // [rows, columns], from LogitStatistics; their gradients are written there
  T cap;
  int64_t first;
  T smoothing;
  T uniform;  // smoothing / classes
  T z_loss;
  ChunkLabels labels;  // [rows]
  const T* maxima;     // [rows], of all ranks, as all that follow
  const T* sums_exp;
  const T* targets;
  const T* grad_losses;

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t index = row.index(), label = labels.at(index);
    auto out = row.ahead(row.out(logits));
    out.streamed = false;  // matrix products read it next
    if (labels.is_padding(label)) return row.each([](T& dx) { dx = T(0); }, out);
    const T grad =
        labels.is_class(label) ? grad_losses[index] : std::numeric_limits<T>::quiet_NaN();
    const T max = maxima[index], sum_exp = sums_exp[index], target = targets[index];
    const T of_lse = T(1) + T(2) * z_loss * (max + std::log(sum_exp));
    const T inverse = kCapped ? T(1) / cap : T(0);
    auto slope = [inverse](T x) { return T(1) - (x * inverse) * (x * inverse); };
    // Where the label is certain, its gradient is a small difference: subtract before multiplying.
    const T softmax = of_lse * (exponential_no_overflow(target - max) / sum_exp);
    T of_label = grad * (softmax - (uniform + (T(1) - smoothing)));
    if constexpr (kCapped) of_label *= slope(target);
    const T scale = grad * of_lse / sum_exp, offset = grad * uniform;
    row.each(
        [=](T& dx, T x) {
          dx = exponential_no_overflow(x - max) * scale - offset;
          if constexpr (kCapped) dx *= slope(x);
        },
        out, row.ahead(row.in(static_cast<const S*>(logits))));
    const int64_t column = label - first;
    if (column < 0 || column >= row.columns()) return;
    row.at(column, [of_label](T& dx) { dx = of_label; }, out);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
