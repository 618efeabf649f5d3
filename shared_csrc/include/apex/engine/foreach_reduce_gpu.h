// foreach_reduce on a GPU: a partial result per chunk, which one block combines; one per tensor
// before it where each tensor's result is asked for.
#pragma once

#include "apex/engine/foreach_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class F>
struct Combine {
  APEX_DEVICE double operator()(double a, double b) const { return F::combine(a, b); }
};

// The block's partial result of `count` elements, in all its threads.
template <class F, class View>
APEX_DEVICE double reduce_chunk(const F& functor, int count, const View& view) {
  using T = typename F::value_type;
  constexpr int N = pack_size<typename View::storage>();
  ListPart<T, N, kReduceRun, false, View> part(count, view);
  double share = 0;
  T run = T(0);  // of the packs that are under way together
  auto add = [&](int pack, int, int lane, const T& value) {
    if (pack == kNoPack) {
      share = F::combine(share, static_cast<double>(functor(value)));
      return;
    }
    if (pack == 0 && lane == 0) {
      share = F::combine(share, static_cast<double>(run));
      run = T(0);
    }
    run = F::combine(run, functor(value));
  };
  part.each(add, view);
  share = F::combine(share, static_cast<double>(run));
  const double partial = reduce_row(share, Combine<F>{});
  if constexpr (requires { functor.wide(); } && !std::is_same_v<T, double>) {
    if (!F::is_reliable(partial)) return reduce_chunk(functor.wide(), count, view);
  }
  return partial;
}

template <bool kLong, class F, class S>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_chunks(ForeachBatch<1, kReduceChunk, kLong> batch,
                          Partials<kReduceChunk> partials, F functor) {
  wait_for_kernels_before();
  partials.locate(batch);
  batch.template with_views<ColumnView<In<S>>>([&](int tensor, int64_t, const auto& view) {
    const double partial = reduce_chunk(functor, batch.elements_of_block(tensor), view);
    if (threadIdx.x == 0) *partials.of_block(batch) = partial;
  });
}

template <class F>
APEX_DEVICE void report(const F& functor, double result) {
  if constexpr (requires { functor.flag; }) {
    if (functor.flag != nullptr && !is_finite(result)) *functor.flag = 1;
  }
}

// One block per tensor.
template <class F, class R>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_tensors(Partials<kReduceChunk> partials, double* combined, R* per_tensor,
                           F functor) {
  wait_for_kernels_before();
  double result = partials.template combined<1>(blockIdx.x, 0, Combine<F>{});
  if (threadIdx.x != 0) return;
  combined[blockIdx.x] = result;
  per_tensor[blockIdx.x] = static_cast<R>(functor.finish(result));
  report(functor, result);
}

// One block. `parts` are the results of tensors, or of chunks where nobody asks for each tensor's.
template <class F, class R>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_reduce_total(int64_t count, const double* parts, R* total, F functor) {
  wait_for_kernels_before();
  const double result = combined_numbers<1>(parts, count, Combine<F>{});
  if (threadIdx.x != 0) return;
  *total = static_cast<R>(functor.finish(result));
  report(functor, result);
}

template <class S, class Context, class F, class R>
void foreach_reduce(const Context& context, const TensorTable& table, const F& functor,
                    R* per_tensor, R* total) {
  Partials<kReduceChunk> partials(context, table, 1);
  for_each_batch<1, kReduceChunk>(context, table, [&]<class Batch>(const Batch& batch) {
    launch<foreach_reduce_chunks<Batch::kLong, F, S>>(blocks_of(batch), dim3(kForeachThreads), 0,
                                                      context.stream(), batch, partials, functor);
    context.check_launch("foreach_reduce_chunks");
  });
  const int64_t tensors = table.tensors();
  const bool each = per_tensor != nullptr && tensors > 0;
  double* parts = partials.all();
  if (each) {
    parts = static_cast<double*>(context.workspace(tensors * sizeof(double)));
    launch<foreach_reduce_tensors<F, R>>(dim3(static_cast<unsigned>(tensors)),
                                         dim3(kForeachThreads), 0, context.stream(), partials,
                                         parts, per_tensor, functor);
    context.check_launch("foreach_reduce_tensors");
  }
  if (total == nullptr) return;
  launch<foreach_reduce_total<F, R>>(dim3(1), dim3(kForeachThreads), 0, context.stream(),
                                     each ? tensors : partials.blocks(), parts, total, functor);
  context.check_launch("foreach_reduce_total");
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
