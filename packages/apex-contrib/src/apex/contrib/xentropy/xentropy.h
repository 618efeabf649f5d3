// Softmax cross entropy with label smoothing, and its gradient, one row of logits at a time.
//
//   lse = log(sum(exp(x))) = max + log(sum_exp),  sum_exp = sum(exp(x - max))
//   loss = (1 - s) * (lse - x[label]) + s * (lse - mean(x))
//        = (max - x[label]) + log(sum_exp) - s * mean(x - x[label])
//   dx = dloss * (exp(x - max) / sum_exp - s / C - (1 - s) * onehot(label))
//
// Szegedy et al. 2016, section 7 (https://arxiv.org/abs/1512.00567). Maximum and sum are kept apart
// for the backward pass: the rounding of an lse of 10^4 would spoil the fourth digit of every
// gradient.
#pragma once

#include <cmath>
#include <limits>

#include "apex/math/softmax.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// Labels [rows], and the one of them that marks rows to be left out.
struct Labels {
  const int64_t* labels;
  int64_t columns;
  int64_t padding;
  bool has_padding;

  APEX_HD int64_t at(int64_t row) const { return labels[row]; }
  APEX_HD bool is_padding(int64_t label) const { return has_padding && label == padding; }
  APEX_HD bool is_class(int64_t label) const { return label >= 0 && label < columns; }
};

// S is the storage type of the logits, L that of the losses.
template <class S, class L>
struct XentropyForward {
  using value_type = compute_t<S>;
  using T = value_type;

  const S* logits;  // [rows, columns], rows `stride` elements apart
  int64_t stride;
  T smoothing;
  Labels labels;  // [rows]
  L* losses;      // [rows]
  T* maxima;      // [rows]
  T* sums_exp;    // [rows]

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t label = labels.at(row.index());
    if (labels.is_padding(label)) return store(row, T(0), T(0), T(1));
    auto x = row.ahead(row.in(logits, stride));
    // A GPU cannot raise an error here: labels without a class give NaN.
    T target =
        labels.is_class(label) ? convert<T>(x.data[label]) : std::numeric_limits<T>::quiet_NaN();
    // Differences to the target keep their digits where all logits share a large offset.
    T reference = is_finite(target) ? target : T(0);
    const auto sums = sums_of_exponentials<T>(row, x, [=](T x) { return x - reference; });
    T max = sums[0];
    T sum_exp = sums[1] + (max - max);  // NaN for inf, as in log_softmax
    T loss = (max - target) + std::log(sum_exp);
    // 0 * inf is NaN: without smoothing, logits of -inf belong to classes that are masked out.
    if (smoothing != T(0)) loss -= smoothing * (sums[2] / row.columns());
    store(row, loss, max, sum_exp);
  }

  template <class R>
  APEX_HD void store(R& row, T loss, T max, T sum_exp) const {
    row.once([&] {
      losses[row.index()] = convert<L>(loss);
      maxima[row.index()] = max;
      sums_exp[row.index()] = sum_exp;
    });
  }
};

template <class S, class L>
struct XentropyBackward {
  using value_type = compute_t<S>;
  using T = value_type;

  const S* logits;  // [rows, columns], rows `stride` elements apart
  int64_t stride;
  T smoothing;
  T uniform;             // smoothing / columns
  Labels labels;         // [rows]
  const T* maxima;       // [rows]
  const T* sums_exp;     // [rows]
  const L* grad_losses;  // [rows]
  S* grad_logits;        // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t label = labels.at(row.index());
    auto out = row.ahead(row.out(grad_logits));
    if (labels.is_padding(label)) return row.each([](T& dx) { dx = T(0); }, out);
    bool is_class = labels.is_class(label);
    T grad = is_class ? convert<T>(grad_losses[row.index()]) : std::numeric_limits<T>::quiet_NaN();
    T max = maxima[row.index()], sum_exp = sums_exp[row.index()];
    T scale = grad / sum_exp, offset = grad * uniform;
    auto x = row.ahead(row.in(logits, stride));
    row.each([=](T& dx, T x) { dx = exponential_no_overflow(x - max) * scale - offset; }, out, x);
    if (!is_class) return;
    // Where the label is certain, dx is a small difference: subtract before multiplying.
    T own = uniform + (T(1) - smoothing);
    row.at(
        label, [=](T& dx, T x) { dx = grad * (exponential_no_overflow(x - max) / sum_exp - own); },
        out, x);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
