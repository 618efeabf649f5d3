// foreach_reduce on the CPU: chunks of fixed size, each reduced in lanes, combined in order.
#pragma once

#include <algorithm>

#include "apex/core/pack.h"
#include "apex/engine/chunks_cpu.h"
#include "apex/engine/columns.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Streams read at once by a thread: a single one is bound by memory latency.
inline constexpr int kReduceStreams = 4;
// Work per thread, in elements, below which a second thread costs more than it brings.
inline constexpr int64_t kReduceGrain = 32768;

// Terms that a lane adds up in T before they go on in double: more would lose digits.
inline constexpr int64_t kReduceRun = 16;

template <class S, class F>
class ChunkReduction {
 public:
  using T = typename F::value_type;

  ChunkReduction(const F& functor, const S* data) : functor_(functor), data_(data) {}

  // Combined terms of data[0:count].
  double run(int64_t count) {
    // Each stream takes a contiguous share of whole packs; the rest follows at the end.
    int64_t stream = count / (kReduceStreams * kPack) * kPack;
    for (int64_t i = 0; i < stream; i += kReduceRun * kPack) {
      add_run<kReduceStreams>(i, std::min(i + kReduceRun * kPack, stream), stream);
    }
    int64_t rest = kReduceStreams * stream;
    if (rest + kPack <= count) add_run<1>(rest, count / kPack * kPack, 0);
    int64_t end = count / kPack * kPack;
    if (end < count) add_some(data_ + end, static_cast<int>(count - end));
    return fold_all<kPack / 2>(sums_);
  }

 private:
  // Packs from begin to end of every stream; streams lie `stride` elements apart.
  template <int kStreams>
  void add_run(int64_t begin, int64_t end, int64_t stride) {
    alignas(64) T lanes[kStreams][kPack] = {};
    for (int64_t i = begin; i < end; i += kPack) {
      for (int s = 0; s < kStreams; ++s) add(data_ + s * stride + i, lanes[s]);
    }
    for (int s = 1; s < kStreams; ++s) fold<kPack>(lanes[0], lanes[s]);
    fold<kPack>(sums_, lanes[0]);
  }

  // A tree: rounding errors grow with its depth instead of with the number of lanes.
  template <int N>
  static double fold_all(double* lanes) {
    fold<N>(lanes, lanes + N);
    if constexpr (N > 1) return fold_all<N / 2>(lanes);
    return lanes[0];
  }

  template <int N, class Into, class From>
  static void fold(Into* into, const From* from) {
    APEX_VECTORIZE
    for (int lane = 0; lane < N; ++lane) {
      into[lane] = F::combine(into[lane], static_cast<Into>(from[lane]));
    }
  }

  template <class Loaded>
  void add_loaded(const Loaded* values, T* lanes) const {
    APEX_VECTORIZE
    for (int lane = 0; lane < kPack; ++lane) {
      lanes[lane] = F::combine(lanes[lane], functor_(convert<T>(values[lane])));
    }
  }

  void add(const S* data, T* lanes) const {
    if constexpr (std::is_same_v<S, Half>) {
      // Compilers do not vectorize this conversion; load_pack() does it by hand.
      alignas(64) float values[kPack];
      load_pack(data, values);
      add_loaded(values, lanes);
    } else {
      add_loaded(data, lanes);
    }
  }

  void add_some(const S* data, int count) {
    alignas(64) compute_t<S> values[kPack];
    alignas(64) T lanes[kPack] = {};
    load_some(data, values, count);
    add_loaded(values, lanes);  // the term of 0 is 0
    fold<kPack>(sums_, lanes);
  }

  const F functor_;
  const S* data_;
  alignas(64) double sums_[kPack] = {};
};

// One chunk's partial result; the functor's own type is too narrow for the terms of some.
template <class S, class F>
double reduce_chunk(const F& functor, const S* data, int64_t count) {
  double partial = ChunkReduction<S, F>(functor, data).run(count);
  if constexpr (requires { functor.wide(); } && !std::is_same_v<typename F::value_type, double>) {
    if (!F::is_reliable(partial)) return reduce_chunk(functor.wide(), data, count);
  }
  return partial;
}

template <class S, class Context, class F, class R>
void foreach_reduce(const Context& context, const TensorTable& table, const F& functor,
                    R* per_tensor, R* total) {
  std::vector<double> partials;
  auto first_chunk = for_each_chunk(
      context, table, kReduceChunk, kReduceGrain, [&](int64_t chunks) { partials.resize(chunks); },
      [&](int64_t t, int64_t index, int64_t begin, int64_t end) {
        const S* data = static_cast<const S*>(table.row(t)[0]);
        partials[index] = reduce_chunk(functor, data + begin, end - begin);
      });

  double combined = 0;
  bool finite = true;
  for (int64_t t = 0; t < table.tensors(); ++t) {
    double own = 0;
    for (int64_t chunk = first_chunk[t]; chunk < first_chunk[t + 1]; ++chunk) {
      own = F::combine(own, partials[chunk]);
    }
    finite = finite && is_finite(own);
    combined = F::combine(combined, own);
    if (per_tensor != nullptr) per_tensor[t] = static_cast<R>(functor.finish(own));
  }
  if (total != nullptr) *total = static_cast<R>(functor.finish(combined));
  if constexpr (requires { functor.flag; }) {
    if (functor.flag != nullptr && !finite) *functor.flag = 1;
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
