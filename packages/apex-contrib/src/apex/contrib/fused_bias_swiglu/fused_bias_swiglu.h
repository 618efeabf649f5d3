// SwiGLU of input + bias, and its gradient, a row at a time; a row of the input is two halves:
//
//   a, b = halves of (input + bias)     y = a * s * b,  s = 1 / (1 + exp(-a))
//   da = dy * b * s * (1 + a * (1 - s)) db = dy * a * s
//
// Shazeer, "GLU Variants Improve Transformer", 2020 (https://arxiv.org/abs/2002.05202), section 2.
#pragma once

#include "apex/math/norm/affine.h"
#include "apex/math/sigmoid.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

// S is the storage type of all tensors. Columns are those of the output: half of the input's.
template <class S>
struct SwigluForward {
  using value_type = compute_t<S>;
  using T = value_type;

  const S* input;  // [rows, 2 * columns]
  const S* bias;   // [2 * columns]; what is absent points to memory that may be read
  ValueOr<T> bias_or_zero;
  S* y;  // [rows, columns]

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t n = row.columns();
    auto of_bias = bias_or_zero;
    row.each(
        [=](T& y, T a, T b, T bias_a, T bias_b) {
          a += of_bias(bias_a);
          y = silu(a) * (b + of_bias(bias_b));
        },
        row.ahead(row.out(y)), row.ahead(row.in(input, 2 * n)), row.ahead(row.in(input + n, 2 * n)),
        row.shared(bias), row.shared(bias + n));
  }
};

template <class S>
struct SwigluBackward {
  using matrix_type = S;
  using value_type = compute_t<S>;
  using T = value_type;
  static constexpr int kSums = 2;  // dbias of both halves

  const S* dy;     // [rows, columns]
  const S* input;  // as of the forward
  const S* bias;
  ValueOr<T> bias_or_zero;
  S* dinput;        // [rows, 2 * columns]
  S* dbias;         // [2 * columns]
  int64_t columns;  // of the output
  bool with_sums;

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t n = row.columns();
    auto first = row.out(dinput, 2 * n), second = row.out(dinput + n, 2 * n);
    if (with_sums) first.streamed = second.streamed = false;  // column_sums() reads them next
    row.each(
        [of_bias = bias_or_zero](T& da, T& db, T dy, T a, T b, T bias_a, T bias_b) {
          a += of_bias(bias_a);
          b += of_bias(bias_b);
          T s = sigmoid(a);
          da = dy * b * silu_slope(a, s);
          db = dy * a * s;
        },
        row.ahead(first), row.ahead(second), row.ahead(row.in(dy)), row.ahead(row.in(input, 2 * n)),
        row.ahead(row.in(input + n, 2 * n)), row.shared(bias), row.shared(bias + n));
  }

  // Of what row() has stored, rounded: on the CPU it is in the cache, and no exp is taken twice.
  template <class R>
  APEX_HD void column_sums(R& row) const {
    int64_t n = row.columns();
    const S* stored = dinput;
    row.template accumulate<kSums>(
        [](Array<T, 2>& sums, T da, T db) {
          sums[0] += da;
          sums[1] += db;
        },
        row.in(stored, 2 * n), row.in(stored + n, 2 * n));
  }

  APEX_HD void finish(int64_t column, const Array<T, kSums>& sums) const {
    dbias[column] = convert<S>(sums[0]);
    dbias[column + columns] = convert<S>(sums[1]);
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
