// Softmax of scaled attention scores, and its gradient, row by row.
//
// y = softmax(scale * x) over the columns that a row sees: all of them, those up to the diagonal of
// its square, or with a mask those that are not masked. A masked score counts as -10000; a row
// whose scores are all masked gets zeros.
#pragma once

#include "apex/core/divide.h"
#include "apex/math/softmax.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {

enum class Scores { kAll, kCausal, kMasked };

inline constexpr float kMaskedScore = -10000.0f;

// The end of the columns that row `row` sees; the rows of a square follow each other.
template <Scores kScores>
APEX_HD int64_t visible_columns(int64_t row, int64_t columns) {
  if (kScores != Scores::kCausal) return columns;
  int64_t query;
  divide(row, columns, query);
  return query + 1;
}

// Zeros where the row does not see.
template <class R, class S>
APEX_HD void clear_hidden(const R& row, int64_t visible, S* result) {
  using T = compute_t<S>;
  const auto hidden = row.within(visible, row.columns());
  hidden.each([](T& y) { y = T(0); }, hidden.out(result));
}

template <class S, Scores kScores>
struct ScaledSoftmax {
  using value_type = compute_t<S>;
  using staged_type = S;
  static constexpr bool kKeepsTerms = true;

  const S* x;  // [rows, columns]
  S* y;
  value_type scale;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    const T factor = scale;
    const int64_t visible = visible_columns<kScores>(row.index(), row.columns());
    const auto seen = row.within(0, visible);
    const auto scores = seen.ahead(seen.stage(x));
    // A negative scale turns the order around: the largest is that of the scaled scores.
    write_softmax<T>(seen, seen.out(y), [factor](T x) { return factor * x; }, Always{}, scores);
    if constexpr (kScores == Scores::kCausal) clear_hidden(row, visible, y);
  }
};

// With a mask [batches, rows_of_mask, columns]: heads * rows_of_mask rows of x for each batch.
template <class S>
struct MaskedSoftmax {
  using value_type = compute_t<S>;
  using staged_type = S;
  static constexpr bool kKeepsTerms = true;

  const S* x;
  const uint8_t* mask;  // not 0: masked
  S* y;
  int64_t heads, rows_of_mask, batch_stride;
  value_type scale;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    const T factor = scale;
    int64_t query, head;
    const int64_t batch = divide(divide(row.index(), rows_of_mask, query), heads, head);
    const uint8_t* own = mask + batch * batch_stride + query * row.columns();
    const auto scores = row.ahead(row.stage(x));
    const auto masked = row.ahead(row.shared(own));
    auto score = [factor](T x, T hidden) {
      T scaled = factor * x;
      return hidden != T(0) ? T(kMaskedScore) : scaled;
    };
    // Only a low score may mean that all are masked; others may be as low.
    auto is_seen = [&](T largest) {
      return !(largest <= T(kMaskedScore)) ||
             row.sum([](T hidden) { return T(hidden == T(0)); }, masked) != T(0);
    };
    write_softmax<T>(row, row.out(y), score, is_seen, scores, masked);
  }
};

// dx = scale * y * (dy - sum(y * dy)).
template <class S, Scores kScores>
struct ScaledSoftmaxBackward {
  using value_type = compute_t<S>;
  using staged_type = S;

  const S *dy, *y;
  S* dx;
  value_type scale;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    const int64_t visible = visible_columns<kScores>(row.index(), row.columns());
    const auto seen = row.within(0, visible);
    const auto gradients = seen.stage(dy);
    const auto results = seen.stage(y);
    softmax_backward<T>(seen, scale, [](T dy) { return dy; }, seen.out(dx), results, gradients);
    if constexpr (kScores == Scores::kCausal) clear_hidden(row, visible, dx);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
