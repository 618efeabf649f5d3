// What 2:4 pruning keeps of four channels: in every row the two largest magnitudes of the four.
//
// Mishra et al. 2021, section 3 (https://arxiv.org/abs/2104.08378). The sum of the two largest of
// a, b, c, d is the largest of a + b, c + d, and max(a, b) + max(c, d).
#pragma once

#include <limits>

#include "apex/core/types.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

template <class T>
APEX_HD T larger(T a, T b) {
  return a < b ? b : a;
}

template <class T>
APEX_HD T largest_two(T a, T b, T c, T d) {
  return larger(larger(a, b) + larger(c, d), larger(a + b, c + d));
}

// S is the storage type of the magnitudes. A row of the engine is one set of four channels.
template <class S>
struct RetainedMagnitude {
  using value_type = compute_t<S>;
  using T = value_type;

  const S* magnitudes;   // [channels, columns], not negative
  const int64_t* fours;  // [rows, 4], channels
  int64_t channels;
  T* retained;  // [rows]

  template <class R>
  APEX_HD void row(R& row) const {
    const int64_t* four = fours + 4 * row.index();
    bool is_valid = true;
    Array<const S*, 4> from;
    for (int i = 0; i < 4; ++i) {
      const bool exists = four[i] >= 0 && four[i] < channels;
      is_valid = is_valid && exists;
      from[i] = magnitudes + (exists ? four[i] : 0) * row.columns();
    }
    const T sum =
        row.sum([](T a, T b, T c, T d) { return largest_two(a, b, c, d); }, row.from(from[0]),
                row.from(from[1]), row.from(from[2]), row.from(from[3]));
    // A GPU cannot raise an error for a channel that does not exist.
    const T result = is_valid ? sum : std::numeric_limits<T>::quiet_NaN();
    row.once([&] { retained[row.index()] = result; });
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
