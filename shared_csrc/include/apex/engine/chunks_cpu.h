// Chunks of fixed size of a list of tensors, shared among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "apex/core/table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What a tensor costs beside its elements, in elements: decides how threads share small tensors.
inline constexpr int64_t kTensorCost = 256;

// Calls body(tensor, index, begin, end) for elements [begin, end) of a tensor, `chunk` of them or
// the rest; `index` counts the chunks of all tensors. Threads share elements evenly; one takes the
// chunks that start within its share, at least `grain` elements. Returns the first index of each
// tensor, and behind them the number of chunks, which `reserve` is told before.
template <class Context, class Reserve, class Body>
std::vector<int64_t> for_each_chunk(const Context& context, const TensorTable& table, int64_t chunk,
                                    int64_t grain, const Reserve& reserve, const Body& body) {
  const int64_t tensors = table.tensors();
  std::vector<int64_t> first(tensors + 1, 0), start(tensors + 1, 0);
  for (int64_t t = 0; t < tensors; ++t) {
    first[t + 1] = first[t] + (table.numel[t] + chunk - 1) / chunk;
    start[t + 1] = start[t] + table.numel[t] + kTensorCost;
  }
  reserve(first.back());
  context.parallel_for(0, start.back(), grain, [&](int64_t begin, int64_t end) {
    int64_t t = std::upper_bound(start.begin(), start.end(), begin) - start.begin() - 1;
    int64_t offset = (begin - start[t] + chunk - 1) / chunk * chunk;
    for (; t < tensors && start[t] < end; ++t, offset = 0) {
      for (; offset < table.numel[t] && start[t] + offset < end; offset += chunk) {
        body(t, first[t] + offset / chunk, offset, std::min(offset + chunk, table.numel[t]));
      }
    }
  });
  return first;
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
