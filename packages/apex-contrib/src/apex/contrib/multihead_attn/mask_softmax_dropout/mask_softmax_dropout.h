// Softmax of masked attention scores with dropout, and the gradient, row by row.
//
// y = softmax(score) with score = x, x + mask, or -inf where a mask of bytes is not 0; a row
// without any finite score becomes NaN. dropped = y / (1 - p) where a random number is at least p,
// else 0.
#pragma once

#include <limits>

#include "apex/core/divide.h"
#include "apex/math/dropout.h"
#include "apex/math/softmax.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

struct NoMask {};

template <class M>
struct MaskedScore {
  template <class T>
  APEX_HD T operator()(const T& x) const {
    return x;
  }
  template <class T>
  APEX_HD T operator()(const T& x, const T& mask) const {
    if constexpr (std::is_same_v<M, uint8_t>) {
      return mask != T(0) ? -std::numeric_limits<T>::infinity() : x;
    } else {
      return x + mask;
    }
  }
};

// A mask [batches, 1 or queries, columns] for rows [batches, heads, queries] of scores.
template <class M>
struct Mask {
  const M* data;
  int64_t heads, queries, rows_of_mask, batch_stride;

  APEX_HD const M* of_row(int64_t row, int64_t columns) const {
    int64_t query, head;
    const int64_t batch = divide(divide(row, queries, query), heads, head);
    return data + batch * batch_stride + (rows_of_mask == 1 ? 0 : query * columns);
  }
};

template <class S, class M, bool kDropout>
struct MaskSoftmax {
  using value_type = compute_t<S>;
  using staged_type = S;
  static constexpr bool kKeepsTerms = true;

  const S* x;  // [rows, columns]
  Mask<M> mask;
  S* y;
  S* dropped;
  Dropout dropout;

  template <class R>
  APEX_HD void row(R& row) const {
    const auto scores = row.ahead(row.stage(x));
    if constexpr (std::is_same_v<M, NoMask>) {
      write(row, scores);
    } else {
      write(row, scores, row.ahead(row.shared(mask.of_row(row.index(), row.columns()))));
    }
  }

 private:
  template <class R, class... Views>
  APEX_HD void write(R& row, const Views&... views) const {
    using T = value_type;
    if constexpr (!kDropout) {
      return write_softmax<T>(row, row.out(y), MaskedScore<M>{}, Always{}, views...);
    } else {
      const Dropout drop = dropout;
      auto use = [&](T inverse, const auto& each_term) {
        auto both = [inverse, drop](T& y, T& dropped, T uniform, T term) {
          y = term * inverse;
          dropped = drop(y, uniform);
        };
        each_term(both, row.out(y), row.out(dropped), row.generated(drop.numbers_of(row)));
      };
      with_softmax<T>(row, MaskedScore<M>{}, Always{}, use, views...);
    }
  }
};

template <class S>
struct MaskSoftmaxBackward {
  using value_type = compute_t<S>;
  using staged_type = S;

  const S *dy, *y;
  S* dx;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    softmax_backward<T>(
        row, T(1), [](T dy) { return dy; }, row.out(dx), row.stage(y), row.stage(dy));
  }
};

// The gradient passes where `keep`, the dropped softmax or a mask, is not 0. (Where softmax itself
// is 0, nothing passes anyway.)
template <class S, class K>
struct MaskSoftmaxDropoutBackward {
  using value_type = compute_t<S>;
  using staged_type = S;

  const S *dy, *y;
  const K* keep;
  const S* dsoftmax;  // gradient of softmax itself, or null
  S* dx;
  double scale;

  template <class R>
  APEX_HD void row(R& row) const {
    using T = value_type;
    const T by = T(scale);
    auto gradient = [by](T dy, T keep) {
      const T kept = dy * by;
      return keep != T(0) ? kept : T(0);
    };
    const auto dropped = row.stage(dy);
    const auto softmax = row.stage(y);
    const auto kept = row.stage(keep);
    if (dsoftmax == nullptr) {
      return softmax_backward<T>(row, T(1), gradient, row.out(dx), softmax, dropped, kept);
    }
    auto both = [gradient](T dy, T keep, T more) { return gradient(dy, keep) + more; };
    softmax_backward<T>(row, T(1), both, row.out(dx), softmax, dropped, kept, row.in(dsoftmax));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
