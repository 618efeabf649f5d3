// The loss of transducers (RNN-T): the negative logarithm of the probability of all ways through a
// lattice of frames t and labels u, and its gradient. Graves 2012, section 2.4
// (https://arxiv.org/abs/1211.3711). With log-probabilities b(t, u) of the blank and l(t, u) of the
// label that comes next:
//
//   alpha(0, 0) = 0
//   alpha(t, u) = log_add(alpha(t - 1, u) + b(t - 1, u), alpha(t, u - 1) + l(t, u - 1))
//   beta(F - 1, Y) = b(F - 1, Y)
//   beta(t, u) = log_add(beta(t + 1, u) + b(t, u), beta(t, u + 1) + l(t, u))
//   loss = -beta(0, 0)
//
// The share of ways that take a step, exp(alpha + score + beta behind it + loss), is minus the
// gradient of its score; a row of logits gets it through softmax's.
#pragma once

#include <cmath>
#include <limits>

#include "apex/core/cells.h"
#include "apex/math/softmax.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

struct Lattice : Cells {
  const int64_t* labels;  // [batch, width - 1]
  int64_t classes, blank;
  bool softmax;  // rows are logits; else logarithms of probabilities

  // Whether a label comes next, and which.
  APEX_HD bool has_label(const Cell& cell) const { return cell.u + 1 < cell.sample.width; }
  APEX_HD int64_t label(const Cell& cell) const {
    return labels[cell.batch * (width - 1) + cell.u];
  }
  APEX_HD bool is_class(int64_t label) const { return label >= 0 && label < classes; }
};

// Scores of every cell: log-probabilities of the blank and of the next label.
template <class S>
struct TransducerScores {
  using value_type = compute_t<S>;
  using T = value_type;

  Lattice lattice;
  const S* x;            // [rows, classes]
  T *maxima, *sums_exp;  // [rows]
  T* scores;             // [rows, 2]
  double *alpha, *beta;  // [rows]; 0 in rows outside of the lattice

  template <class R>
  APEX_HD void row(R& row) const {
    const Cells::Cell cell = lattice.cell(row.index());
    if (!cell.is_inside) {
      return row.once([&] {
        alpha[row.index()] = beta[row.index()] = 0;
        store(row.index(), T(0), T(1), T(0), T(0));
      });
    }
    auto in = row.ahead(row.in(x));
    Array<T, 2> sums{{T(0), T(1)}};
    if (lattice.softmax) sums = sums_of_exponentials<T>(row, in);
    const T max = sums[0], sum_exp = sums[1] + (max - max);  // NaN for inf, as in log_softmax
    row.once([&] {
      const T log_sum = std::log(sum_exp);
      T next = T(0);
      if (lattice.has_label(cell)) {
        const int64_t label = lattice.label(cell);
        // A GPU cannot raise an error here: a label without a class gives NaN.
        next = lattice.is_class(label) ? convert<T>(in.data[label]) - max - log_sum
                                       : std::numeric_limits<T>::quiet_NaN();
      }
      store(row.index(), max, sum_exp, convert<T>(in.data[lattice.blank]) - max - log_sum, next);
    });
  }

  APEX_HD void store(int64_t row, T max, T sum_exp, T blank, T label) const {
    maxima[row] = max;
    sums_exp[row] = sum_exp;
    scores[2 * row] = blank;
    scores[2 * row + 1] = label;
  }
};

APEX_HD double log_add(double a, double b) {
  const double max = a > b ? a : b, min = a > b ? b : a;
  if (max == -std::numeric_limits<double>::infinity()) return max + min;  // or NaN
  return max + std::log1p(std::exp(min - max));
}

// alpha of sample i / 2 where i is even, else beta and the loss, diagonal by diagonal: the cells of
// one do not depend on each other. In double: shares of ways are differences of numbers as large as
// the loss.
template <class T>
struct TransducerWays {
  Lattice lattice;
  const T* scores;       // [rows, 2]
  double *alpha, *beta;  // [rows]
  T* loss;               // [batch]

  template <class G>
  APEX_HD void sample(G& group) const {
    const int64_t b = group.index() / 2;
    const Cells::Sample s = lattice.sample(b);
    if (s.is_valid && s.frames > 0) {
      if (group.index() % 2 == 0) return forward(group, s);
      backward(group, s);
      return group.once([&] { loss[b] = static_cast<T>(-beta[s.start]); });
    }
    // Without frames only the empty text is possible. Lengths that do not fit give NaN.
    group.once([&] {
      if (group.index() % 2 == 0) return;
      const T impossible = std::numeric_limits<T>::infinity();
      loss[b] = !s.is_valid ? std::numeric_limits<T>::quiet_NaN() : s.width > 1 ? impossible : T(0);
    });
  }

  // Calls f(t, u, row) for the cells of diagonal d = t + u.
  template <class G, class F>
  static APEX_HD void diagonal(G& group, const Cells::Sample& s, int64_t d, const F& f) {
    const int64_t first = d < s.frames ? 0 : d - s.frames + 1, last = d < s.width ? d : s.width - 1;
    group.each(first, last + 1, [&](int64_t u) { f(d - u, u, s.start + (d - u) * s.stride + u); });
  }

  template <class G>
  APEX_HD void forward(G& group, const Cells::Sample& s) const {
    const double none = -std::numeric_limits<double>::infinity();
    for (int64_t d = 0; d < s.frames + s.width - 1; ++d) {
      diagonal(group, s, d, [&](int64_t t, int64_t u, int64_t row) {
        const int64_t frame = row - s.stride, label = row - 1;  // where ways come from
        double by_blank = t > 0 ? alpha[frame] + scores[2 * frame] : none;
        double by_label = u > 0 ? alpha[label] + scores[2 * label + 1] : none;
        alpha[row] = d == 0 ? 0.0 : log_add(by_blank, by_label);
      });
    }
  }

  template <class G>
  APEX_HD void backward(G& group, const Cells::Sample& s) const {
    const double none = -std::numeric_limits<double>::infinity();
    const int64_t last = s.frames + s.width - 2;
    for (int64_t d = last; d >= 0; --d) {
      diagonal(group, s, d, [&](int64_t t, int64_t u, int64_t row) {
        double by_blank = t + 1 < s.frames ? beta[row + s.stride] + scores[2 * row] : none;
        double by_label = u + 1 < s.width ? beta[row + 1] + scores[2 * row + 1] : none;
        beta[row] = d == last ? double(scores[2 * row]) : log_add(by_blank, by_label);
      });
    }
  }
};

template <class S>
struct TransducerBackward {
  using value_type = compute_t<S>;
  using T = value_type;

  Lattice lattice;
  const T* grad_loss;          // [batch]
  const S* x;                  // [rows, classes]
  const T *maxima, *sums_exp;  // [rows]
  const T* scores;             // [rows, 2]
  const double *alpha, *beta;  // [rows]
  S* grad_x;                   // [rows, classes]

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t r = row.index();
    const Cells::Cell cell = lattice.cell(r);
    auto out = row.ahead(row.out(grad_x));
    if (!cell.is_inside) return row.each([](T& dx) { dx = T(0); }, out);
    const Cells::Sample& s = cell.sample;
    const double before = alpha[r] - beta[s.start];
    const T grad = -grad_loss[cell.batch];
    // The gradient of a score whose step leads to ways of this beta.
    auto share = [=](T score, double behind) {
      return grad * std::exp(static_cast<T>(before + score + behind));
    };
    T by_blank = T(0), by_label = T(0);
    if (cell.t + 1 < s.frames) {
      by_blank = share(scores[2 * r], beta[r + s.stride]);
    } else if (cell.u + 1 == s.width) {
      by_blank = share(scores[2 * r], 0);
    }
    if (cell.u + 1 < s.width) by_label = share(scores[2 * r + 1], beta[r + 1]);
    // Probabilities are exp(x - max) * inverse, which softmax's gradient subtracts.
    const T max = maxima[r], inverse = lattice.softmax ? 1 / sums_exp[r] : T(0);
    const T scale = -(by_blank + by_label) * inverse;
    auto in = row.ahead(row.in(x));
    row.each([=](T& dx, T x) { dx = exponential_no_overflow(x - max) * scale; }, out, in);
    // Where a step is certain, dx is a small difference: subtract before multiplying.
    auto subtract = [&](int64_t at, T own, T other) {
      row.at(
          at,
          [=](T& dx, T x) {
            const T p = exponential_no_overflow(x - max) * inverse;
            dx = own * (T(1) - p) - other * p;
          },
          out, in);
    };
    const int64_t label = lattice.has_label(cell) ? lattice.label(cell) : -1;
    if (label == lattice.blank) return subtract(label, by_blank + by_label, T(0));
    subtract(lattice.blank, by_blank, by_label);
    if (lattice.is_class(label)) subtract(label, by_label, by_blank);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
