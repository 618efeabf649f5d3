// The joint of transducers: h(t, u) = dropout(relu(f(t) + g(u))), for the cells of every sample,
// and its gradients, which add up cells of one frame or of one label.
#pragma once

#include "apex/core/cells.h"
#include "apex/core/types.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

template <class S>
struct TransducerJointForward {
  using value_type = compute_t<S>;
  using T = value_type;

  Cells cells;
  int64_t columns;
  const S* f;           // [batch, frames, columns]
  const S* g;           // [batch, width, columns]
  const uint8_t* keep;  // [rows, columns], or null: all are kept
  S* h;                 // [rows, columns]
  T lowest;             // 0 with ReLU, else -inf
  T scale;              // 1 / (1 - p)

  int64_t cells_in_row;  // how many cells make a row of the engine

  template <class R>
  APEX_HD void row(R& row) const {
    const auto one = row.within(0, columns);
    const int64_t begin = row.index() * cells_in_row, left = cells.rows - begin;
    const int64_t end = begin + (left < cells_in_row ? left : cells_in_row);
    for (int64_t first = begin; first < end;) {
      const Cells::Cell cell = cells.cell(first);
      const int64_t count = end - first < cell.alike ? end - first : cell.alike;
      join(one, cell, first, count);
      first += count;
    }
  }

 private:
  // Cells `first` to `first + count`, of which `cell` is the first; all are inside, or none.
  template <class R>
  APEX_HD void join(const R& row, const Cells::Cell& cell, int64_t first, int64_t count) const {
    auto to_h = row.to(h + first * columns, columns);
    if (!cell.is_inside) return row.each_of(count, [](T& h) { h = T(-1); }, to_h);
    auto of_f = row.shared(f + (cell.batch * cells.frames + cell.t) * columns);
    auto of_g = row.from(g + (cell.batch * cells.width + cell.u) * columns, columns);
    const T low = lowest, by = scale;
    if (keep == nullptr) {
      return row.each_of(
          count,
          [=](T& h, T f, T g) {
            const T sum = f + g;
            h = sum < low ? low : sum;  // NaN stays
          },
          to_h, of_f, of_g);
    }
    row.each_of(
        count,
        [=](T& h, T f, T g, T keep) {
          const T sum = f + g;
          const T kept = (sum < low ? low : sum) * by;
          h = keep != T(0) ? kept : T(0);
        },
        to_h, of_f, of_g, row.from(keep + first * columns, columns));
  }
};

// Sums over the cells of a frame (of_f) or of a label. Where ReLU lets a gradient pass is computed
// again from f and g, which the cache holds, so that no result has to be kept: the sum is rounded
// to 0 nowhere. A branch for each row would make its loads wait for those of the row before.
template <class S, bool kRelu, bool kKeep>
struct TransducerJointBackward {
  using value_type = compute_t<S>;
  using storage_type = S;
  using T = value_type;
  static constexpr int kSums = 1;

  int64_t columns;
  const S* dh;          // [rows, columns]
  const S* f;           // as of the forward; read with kRelu
  const S* g;           // likewise
  const uint8_t* keep;  // [rows, columns]; read with kKeep
  S* gradient;          // [segments, columns]
  T scale;

  template <class R, class SumsOf>
  APEX_HD void column_sums(R& row, const SumsOf& sums_of_cell) const {
    if constexpr (kRelu) {
      const auto [frame, label] = sums_of_cell();
      of_relu(row, f + frame * columns, g + label * columns);
    } else if constexpr (kKeep) {
      row.template accumulate<1>(
          [](Array<T, 1>& sums, T dh, T keep) { sums[0] += keep != T(0) ? dh : T(0); }, row.in(dh),
          row.in(keep));
    } else {
      row.template accumulate<1>([](Array<T, 1>& sums, T dh) { sums[0] += dh; }, row.in(dh));
    }
  }

  template <class R, class Sums>
  APEX_HD void finish(R& row, const Sums& sums) const {
    const T by = scale;
    row.each([=](T& gradient, T sum) { gradient = sum * by; }, row.out(gradient), sums[0]);
  }

 private:
  template <class R>
  APEX_HD void of_relu(R& row, const S* frame, const S* label) const {
    const auto of_f = row.shared(frame), of_g = row.shared(label);
    if constexpr (kKeep) {
      row.template accumulate<1>(
          [](Array<T, 1>& sums, T dh, T keep, T f, T g) {
            sums[0] += zero_where(!(f + g > T(0)) | (keep == T(0)), dh);
          },
          row.in(dh), row.in(keep), of_f, of_g);
    } else {
      row.template accumulate<1>(
          [](Array<T, 1>& sums, T dh, T f, T g) { sums[0] += zero_where(!(f + g > T(0)), dh); },
          row.in(dh), of_f, of_g);
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
