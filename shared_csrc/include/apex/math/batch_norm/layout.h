// The two layouts of a normalized input, so that each formula is written once.
//
// An input [N, C, *] is walked as the matrix [N * C, elements of *]: a row belongs to one channel.
// An input [*, C] is walked as [elements of *, C]: a column belongs to one channel.
#pragma once

#include <utility>

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <bool kChannelLast>
struct Layout {
  int64_t channels;

  // functor(T& out, channel parameters..., inputs...) for each element of the row; `vectors` are
  // the parameters, each [channels].
  template <class T, int N, class R, class F, class Out, class... Inputs>
  APEX_HD void each(R& row, const Array<const T*, N>& vectors, const F& functor, Out out,
                    Inputs... inputs) const {
    expand(std::make_index_sequence<N>(), row, vectors, functor, out, inputs...);
  }

 private:
  template <size_t... I, class T, int N, class R, class F, class Out, class... Inputs>
  APEX_HD void expand(std::index_sequence<I...>, R& row, const Array<const T*, N>& vectors,
                      const F& functor, Out out, Inputs... inputs) const {
    if constexpr (kChannelLast) {
      row.each(functor, out, row.shared(vectors[I])..., inputs...);
    } else {
      int64_t channel = row.index() % channels;
      Array<T, N> parameters{{vectors[I][channel]...}};
      row.each([=](T& result, auto... values) { functor(result, parameters[I]..., values...); },
               out, inputs...);
    }
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
