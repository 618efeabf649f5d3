// Rotary position embeddings: a row is a token with all its heads, whose angles are the same.
//
// Su et al. 2021 (https://arxiv.org/abs/2104.09864), with the channels of a pair half the rotated
// width apart: y = x cos + rotate_half(x) sin, rotate_half(x) = (-second half, first half). The
// inverse is the transposed rotation, which is the gradient.
#pragma once

#include "apex/core/divide.h"
#include "apex/core/types.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {

// Of a tensor [batch, heads, sequence, channels], whose channels are contiguous.
struct TokenStrides {
  int64_t batch, head, token;
};
struct TokenCounts {
  int64_t batch, heads, sequence;
};

// Which table row a token takes: its place in the sequence divided by `divisor`, modulo `modulus`;
// or, unless null, what `positions` [sequence] says. Outside the table there is none.
struct TableRow {
  const int64_t* positions;
  int64_t divisor, modulus, rows;

  APEX_HD int64_t of(int64_t token) const {
    if (positions != nullptr) return positions[token];
    int64_t rest = 0;
    const int64_t place = divisor == 1 ? token : divide(token, divisor, rest);
    if (place < modulus) return place;
    divide(place, modulus, rest);
    return rest;
  }
};

// S is what tokens are stored in, C what the tables are.
template <class S, class C>
struct RotaryEmbedding {
  using value_type = compute_t<S>;

  const S* x;
  const C *cos, *sin;  // [rows of the table, width]
  S* y;
  TokenStrides x_strides, y_strides;
  TokenCounts counts;
  bool tokens_first;  // rows follow each other as [sequence, batch, heads], else the batch is first
  TableRow table;
  int64_t begin, width, end;  // channels [begin, begin + width) are rotated, the rest to end copied
  bool inverse;

  template <class R>
  APEX_HD void row(R& row) const {
    int64_t b = 0, token = 0;
    if (tokens_first) {
      token = divide(row.index(), counts.batch, b);
    } else {
      b = divide(row.index(), counts.sequence, token);
    }
    const S* from = x + b * x_strides.batch + token * x_strides.token;
    S* to = y + b * y_strides.batch + token * y_strides.token;
    const int64_t place = table.of(token);
    const bool is_known = place >= 0 && place < table.rows;
    const int64_t offset = (is_known ? place : 0) * width;
    const auto pairs = row.within(0, width / 2);
    const auto rest = row.within(begin + width, end);
    rotate(pairs, from + begin, to + begin, offset, is_known);
    if (begin + width < end) {
      rest.each_of(
          counts.heads, [](value_type& y, value_type x) { y = x; }, rest.to(to, y_strides.head),
          rest.from(from, x_strides.head));
    }
  }

 private:
  template <class R>
  APEX_HD void rotate(const R& pairs, const S* from, S* to, int64_t offset, bool is_known) const {
    using T = value_type;
    const int64_t half = width / 2;
    const C *c = cos + offset, *s = sin + offset;
    const C* first = inverse ? s + half : s;
    const C* second = inverse ? s : s + half;
    // NaN, where there is no angle, reaches all channels.
    const T sign = !is_known ? std::numeric_limits<T>::quiet_NaN() : inverse ? T(-1) : T(1);
    const int64_t from_next = x_strides.head, to_next = y_strides.head;
    pairs.each_of(
        counts.heads,
        [sign](T& y1, T& y2, T x1, T x2, T c1, T c2, T s1, T s2) {
          y1 = x1 * c1 - sign * s1 * x2;
          y2 = x2 * c2 + sign * s2 * x1;
        },
        pairs.to(to, to_next), pairs.to(to + half, to_next), pairs.from(from, from_next),
        pairs.from(from + half, from_next), pairs.shared(c), pairs.shared(c + half),
        pairs.shared(first), pairs.shared(second));
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
