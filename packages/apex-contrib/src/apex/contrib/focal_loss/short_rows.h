// Focal loss of short rows on the CPU: rows follow each other in memory, and several of them are
// one loop, for which no row ends. A row of 9 columns by itself costs as much as one of 64.
// focal_loss.cpp includes the engine, whose vectors the sums are made of, before this file.
#pragma once

#include <algorithm>

#include "apex/core/pack.h"
#include "focal_loss.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// Elements of the rows that are taken together, at most: less than a run of streamed stores; and
// the longest rows for which that pays.
inline constexpr int64_t kTogether = 960, kShortRow = 240;

// All columns are classes, and targets are checked.
template <class S, bool kSquared>
struct ShortRows : FocalLoss<S, kSquared> {
  using Base = FocalLoss<S, kSquared>;
  using T = typename Base::T;

  int64_t rows;  // of the matrix

  int64_t rows_together() const { return kTogether / this->classes; }

  // each(row of the matrix, its first column among those together)
  template <class R, class F>
  void each_row(const R& row, const F& each) const {
    const int64_t first = row.index() * rows_together();
    const int64_t count = std::min(rows_together(), rows - first);
    for (int64_t r = 0; r < count; ++r) each(first + r, r * this->classes);
  }
  // The columns that there are: the last rows may be fewer.
  template <class R>
  auto present(const R& row) const {
    const int64_t left = rows - row.index() * rows_together();
    return row.within(0, std::min(rows_together(), left) * this->classes);
  }
};

template <class T>
T sum_of_short(const T* terms, int64_t count) {
  Vector<T, kGroup> sums{};
  for (int64_t first = 0; first < count; first += kGroup) {
    alignas(64) T group[kGroup];
    load_group(terms + first, group, static_cast<int>(std::min<int64_t>(count - first, kGroup)));
    Vector<T, kGroup> lanes;
    memcpy(&lanes, group, sizeof(lanes));
    sums += lanes;
  }
  return tree_sum<T, kGroup>(sums);
}

template <class S, bool kSquared>
struct ShortRowsForward : ShortRows<S, kSquared> {
  using T = typename ShortRows<S, kSquared>::T;

  T* losses;  // [rows]

  template <class R>
  void row(R& row) const {
    alignas(64) T terms[kTogether];
    const auto part = this->present(row);
    part.each([term = this->negative](T& loss, T x) { loss = term.loss(-x); }, part.to(terms),
              part.ahead(part.in(this->x)));
    const S* x = row.in(this->x).data;
    this->each_row(row, [&](int64_t index, int64_t begin) {
      const int64_t target = this->targets[index];
      if (target >= 0) {
        terms[begin + target] = this->positive.loss(convert<T>(x[begin + target]));
      }
      const T sum = sum_of_short(terms + begin, this->classes);
      losses[index] = target == kIgnored ? T(0) : sum;
    });
  }
};

template <class S, bool kSquared>
struct ShortRowsBackward : ShortRows<S, kSquared> {
  using T = typename ShortRows<S, kSquared>::T;

  Strided<T> grad_losses;  // [rows]
  S* grad_x;               // like x

  template <class R>
  void row(R& row) const {
    alignas(64) T grads[kTogether];
    this->each_row(row, [&](int64_t index, int64_t begin) {
      std::fill_n(grads + begin, this->classes, grad_losses[index]);
    });
    const auto part = this->present(row);
    part.each([term = this->negative](T& dx, T x, T grad) { dx = -grad * term.gradient(-x); },
              part.ahead(part.out(grad_x)), part.ahead(part.in(this->x)),
              part.from(static_cast<const T*>(grads)));
    const S* x = row.in(this->x).data;
    S* dx = row.out(grad_x).data;
    this->each_row(row, [&](int64_t index, int64_t begin) {
      const int64_t target = this->targets[index];
      if (target == kIgnored) std::fill_n(dx + begin, this->classes, convert<S>(T(0)));
      if (target < 0) return;
      const T own = convert<T>(x[begin + target]);
      dx[begin + target] = convert<S>(grad_losses[index] * this->positive.gradient(own));
    });
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
