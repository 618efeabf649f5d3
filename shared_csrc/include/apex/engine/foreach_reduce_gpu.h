// foreach_reduce on a GPU: a partial result per chunk, then one block combines them per tensor.
#pragma once

#include "apex/engine/foreach_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class F>
struct Combine {
  APEX_DEVICE double operator()(double a, double b) const { return F::combine(a, b); }
};

// The calling thread's share of data[begin:end), combined.
template <class F, class S>
APEX_DEVICE double reduce_share(const F& functor, const S* data, int64_t begin, int64_t end) {
  using T = typename F::value_type;
  constexpr int N = pack_size<S>();
  constexpr int64_t kStride = int64_t{kForeachThreads} * N;
  double result = 0;
  int64_t packs_end = is_aligned<N>(data) ? begin + (end - begin) / N * N : begin;
  for (int64_t i = begin + threadIdx.x * N; i < packs_end; i += kReduceRun * kStride) {
    T run = T(0);
#pragma unroll
    for (int k = 0; k < kReduceRun; ++k) {
      if (i + k * kStride < packs_end) {
        T values[N];
        load_pack(data + i + k * kStride, values);
#pragma unroll
        for (int lane = 0; lane < N; ++lane) run = F::combine(run, functor(values[lane]));
      }
    }
    result = F::combine(result, static_cast<double>(run));
  }
  for (int64_t i = packs_end + threadIdx.x; i < end; i += kForeachThreads) {
    result = F::combine(result, static_cast<double>(functor(convert<T>(data[i]))));
  }
  return result;
}

// The block's partial result of data[begin:end), in all its threads.
template <class F, class S>
APEX_DEVICE double reduce_chunk(const F& functor, const S* data, int64_t begin, int64_t end) {
  double share = reduce_share(functor, data, begin, end);
  double partial = reduce_row(share, Combine<F>{});
  if constexpr (requires { functor.wide(); } && !std::is_same_v<typename F::value_type, double>) {
    if (!F::is_reliable(partial)) return reduce_chunk(functor.wide(), data, begin, end);
  }
  return partial;
}

template <class F, class S>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_chunks(ForeachBatch<1, kReduceChunk> batch, Partials<kReduceChunk> partials,
                          F functor) {
  partials.locate(batch);
  const int tensor = batch.tensor_of_block();
  int64_t begin = batch.begin_of_block(tensor);
  int64_t end = min(begin + kReduceChunk, batch.numel[tensor]);
  double partial = reduce_chunk(functor, static_cast<const S*>(batch.data[tensor][0]), begin, end);
  if (threadIdx.x == 0) *partials.of_block(batch) = partial;
}

// One block per tensor.
template <class F>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_tensors(Partials<kReduceChunk> partials, double* combined, F functor) {
  double result = partials.combined(blockIdx.x, 0, Combine<F>{});
  if (threadIdx.x != 0) return;
  combined[blockIdx.x] = result;
  if constexpr (requires { functor.flag; }) {
    if (functor.flag != nullptr && !is_finite(result)) *functor.flag = 1;
  }
}

template <class F, class R>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_total(int64_t tensors, const double* combined, R* per_tensor, R* total,
                         F functor) {
  double result = 0;
  for (int64_t t = threadIdx.x; t < tensors; t += kForeachThreads) {
    result = F::combine(result, combined[t]);
    if (per_tensor != nullptr) per_tensor[t] = static_cast<R>(functor.finish(combined[t]));
  }
  result = reduce_row(result, Combine<F>{});
  if (threadIdx.x == 0) *total = static_cast<R>(functor.finish(result));
}

template <class S, class Context, class F, class R>
void foreach_reduce(const Context& context, const TensorTable& table, const F& functor,
                    R* per_tensor, R* total) {
  int64_t tensors = table.tensors();
  double* combined = static_cast<double*>(context.workspace((tensors + 1) * sizeof(double)));
  Partials<kReduceChunk> partials(context, table, 1);
  for_each_batch<1, kReduceChunk>(table, [&](const auto& batch) {
    launch<foreach_reduce_chunks<F, S>>(blocks_of(batch), dim3(kForeachThreads), 0,
                                        context.stream(), batch, partials, functor);
    context.check_launch("foreach_reduce_chunks");
  });
  if (tensors > 0) {
    launch<foreach_reduce_tensors<F>>(dim3(static_cast<unsigned>(tensors)), dim3(kForeachThreads),
                                      0, context.stream(), partials, combined, functor);
    context.check_launch("foreach_reduce_tensors");
  }
  launch<foreach_reduce_total<F, R>>(dim3(1), dim3(kForeachThreads), 0, context.stream(), tensors,
                                     combined, per_tensor, total, functor);
  context.check_launch("foreach_reduce_total");
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
