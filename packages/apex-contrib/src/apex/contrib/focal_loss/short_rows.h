// Focal loss of short rows on the CPU: rows follow each other in memory, and several of them are
// one loop, for which no row ends. A row of 9 columns by itself costs as much as one of 64.
// focal_loss.cpp includes the engine, whose vectors the sums are made of, before this file.
#pragma once

#include <algorithm>

#include "apex/core/pack.h"
#include "focal_loss.h"

#if defined(APEX_CPU)
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
  // What is computed for the logits of targets, and where these are among the rows together.
  struct OfTargets {
    int64_t count = 0;
    bool has_ignored = false;
    int64_t at[kTogether];
    T values[kTogether];

    void note(int64_t target, int64_t begin) {
      if (target >= 0) at[count++] = begin + target;
      has_ignored |= target == kIgnored;
    }
  };
  // functor(T& value, T x) for the logits of all targets: an exp for each by itself took as long as
  // those of all columns.
  template <class R, class F>
  void each_target(const R& row, const F& functor, OfTargets& of) const {
    const S* x = row.in(this->x).data;
    for (int64_t i = 0; i < of.count; ++i) of.values[i] = convert<T>(x[of.at[i]]);
    const auto part = row.within(0, of.count);
    const T* logits = of.values;
    part.each(functor, part.to(of.values), part.from(logits));
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
    typename ShortRows<S, kSquared>::OfTargets own;
    this->each_row(row,
                   [&](int64_t index, int64_t begin) { own.note(this->targets[index], begin); });
    this->each_target(row, [term = this->positive](T& loss, T x) { loss = term.loss(x); }, own);
    // All of them, then all sums: a vector read right behind the store of one lane waits for it.
    for (int64_t i = 0; i < own.count; ++i) terms[own.at[i]] = own.values[i];
    this->each_row(row, [&](int64_t index, int64_t begin) {
      const T sum = sum_of_short(terms + begin, this->classes);
      losses[index] = this->targets[index] == kIgnored ? T(0) : sum;
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
    typename ShortRows<S, kSquared>::OfTargets own;
    this->each_row(row, [&](int64_t index, int64_t begin) {
      own.note(this->targets[index], begin);
      std::fill_n(grads + begin, this->classes, grad_losses[index]);
    });
    const auto part = this->present(row);
    part.each([term = this->negative](T& dx, T x, T grad) { dx = -grad * term.gradient(-x); },
              part.ahead(part.out(grad_x)), part.ahead(part.in(this->x)),
              part.from(static_cast<const T*>(grads)));
    this->each_target(row, [term = this->positive](T& dx, T x) { dx = term.gradient(x); }, own);
    S* dx = row.out(grad_x).data;
    for (int64_t i = 0; i < own.count; ++i) {
      dx[own.at[i]] = convert<S>(grads[own.at[i]] * own.values[i]);
    }
    if (!own.has_ignored) return;
    this->each_row(row, [&](int64_t index, int64_t begin) {
      if (this->targets[index] == kIgnored) {
        std::fill_n(dx + begin, this->classes, convert<S>(T(0)));
      }
    });
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
#endif
