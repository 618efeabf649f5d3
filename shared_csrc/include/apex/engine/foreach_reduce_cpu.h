// foreach_reduce on the CPU: chunks of fixed size, each reduced in lanes, combined in order.
#pragma once

#include <algorithm>

#include "apex/engine/lanes_cpu.h"
#include "apex/engine/columns.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per partial result. Small enough that a float lane adds at most 1,024 terms.
inline constexpr int64_t kReduceChunk = 65536;
// Streams read at once by a thread: a single one is bound by memory latency.
inline constexpr int kReduceStreams = 4;

template <class S, class F>
class ChunkReduction {
 public:
  using T = typename F::value_type;

  // Combined terms of data[0:count].
  static T run(const F& functor, const S* data, int64_t count) {
    alignas(64) T lanes[kReduceStreams][kPack] = {};
    // Each stream takes a contiguous quarter of whole packs; the rest follows at the end.
    int64_t stream = count / (kReduceStreams * kPack) * kPack;
    for (int64_t i = 0; i < stream; i += kPack) {
      for (int s = 0; s < kReduceStreams; ++s) add(functor, data + s * stream + i, lanes[s]);
    }
    int64_t i = kReduceStreams * stream;
    for (; i + kPack <= count; i += kPack) add(functor, data + i, lanes[0]);
    for (int lane = 0; i < count; ++i, ++lane) {
      lanes[1][lane] = F::combine(lanes[1][lane], functor(convert<T>(data[i])));
    }
    for (int s = 1; s < kReduceStreams; ++s) {
      for (int lane = 0; lane < kPack; ++lane) {
        lanes[0][lane] = F::combine(lanes[0][lane], lanes[s][lane]);
      }
    }
    for (int width = kPack / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) {
        lanes[0][lane] = F::combine(lanes[0][lane], lanes[0][lane + width]);
      }
    }
    return lanes[0][0];
  }

 private:
  static void add(const F& functor, const S* data, T (&lanes)[kPack]) {
    Lanes<T, ReadView<S>> pack(ReadView<S>{data});
    pack.at(0);
    APEX_VECTORIZE
    for (int lane = 0; lane < kPack; ++lane) {
      lanes[lane] = F::combine(lanes[lane], pack.call([&](T x) { return functor(x); }, lane));
    }
  }
};

template <class S, class Context, class F>
void foreach_reduce(const Context& context, const TensorTable& table, const F& functor,
                    typename F::value_type* per_tensor, typename F::value_type* total) {
  using T = typename F::value_type;
  std::vector<int64_t> first_chunk(table.tensors() + 1, 0);
  for (int64_t t = 0; t < table.tensors(); ++t) {
    first_chunk[t + 1] = first_chunk[t] + (table.numel[t] + kReduceChunk - 1) / kReduceChunk;
  }
  int64_t chunks = first_chunk.back();
  std::vector<T> partials(chunks);

  int64_t elements = 0;
  for (int64_t numel : table.numel) elements += numel;
  // Threads share chunks evenly; a thread is worth it from about one chunk's work on.
  int64_t grain = elements <= kReduceChunk ? chunks : 1;
  context.parallel_for(0, chunks, std::max<int64_t>(grain, 1), [&](int64_t begin, int64_t end) {
    int64_t tensor =
        std::upper_bound(first_chunk.begin(), first_chunk.end(), begin) - first_chunk.begin() - 1;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (chunk >= first_chunk[tensor + 1]) ++tensor;
      int64_t offset = (chunk - first_chunk[tensor]) * kReduceChunk;
      int64_t count = std::min(kReduceChunk, table.numel[tensor] - offset);
      const S* data = static_cast<const S*>(table.row(tensor)[0]) + offset;
      partials[chunk] = ChunkReduction<S, F>::run(functor, data, count);
    }
  });

  // In double: a list may have very many chunks.
  double sum = 0;
  bool finite = true;
  for (int64_t t = 0; t < table.tensors(); ++t) {
    double own = 0;
    for (int64_t chunk = first_chunk[t]; chunk < first_chunk[t + 1]; ++chunk) {
      own = F::combine(own, static_cast<double>(partials[chunk]));
      finite = finite && is_finite(partials[chunk]);
    }
    sum = F::combine(sum, own);
    if (per_tensor != nullptr) per_tensor[t] = static_cast<T>(functor.finish(own));
  }
  *total = static_cast<T>(functor.finish(sum));
  if constexpr (requires { functor.flag; }) {
    if (functor.flag != nullptr && !finite) *functor.flag = 1;
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
