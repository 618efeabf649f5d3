// foreach_fold on a GPU: a block per chunk leaves its partial sums, then one block per tensor adds
// them.
#pragma once

#include "apex/engine/foreach_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <int K, class F, class Batch, class... Views>
APEX_DEVICE void fold_block(const F& functor, const Batch& batch,
                            const Partials<kFoldChunk>& partials, int tensor,
                            const Views&... views) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  constexpr int N = pack_size<typename Views::storage...>();
  ListPart<typename Own::value_type, N, packs_under_way<N, kForeachPacks, Views...>(), false,
           Views...>
  part(batch.elements_of_block(tensor), views...);
  if (skipped(functor)) return;  // the same for all threads: nobody waits at the barrier
  partials.locate(batch);
  const auto plain = prepared_once(functor);
  const Own own = of_tensor(plain, batch.first_tensor + tensor);
  double sums[K] = {};
  auto add = [&](int, int, int, auto&... values) {
    double terms[K];
    own(terms, values...);
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] = fold_terms<Own>(sums[k], terms[k]);
  };
  part.each(add, views...);
  for (int k = 0; k < K; ++k) {
    double sum = reduce_row(sums[k], FoldTerms<Own>{});
    if (threadIdx.x == 0) partials.of_block(batch)[k] = sum;
  }
}

template <bool kLong, int K, class F, class... Columns>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_fold_chunks(ForeachBatch<sizeof...(Columns), kFoldChunk, kLong> batch,
                        Partials<kFoldChunk> partials, F functor) {
  wait_for_kernels_before();
  batch.template with_views<ColumnView<Columns>...>([&](int tensor, int64_t, const auto&... views) {
    fold_block<K>(functor, batch, partials, tensor, views...);
  });
}

// One block per tensor.
template <int K, class Own, class F>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_fold_tensors(Partials<kFoldChunk> partials, double* sums, F functor) {
  wait_for_kernels_before();
  if (skipped(functor)) return;
  for (int k = 0; k < K; ++k) {
    double sum = partials.template combined<K>(blockIdx.x, k, FoldTerms<Own>{});
    if (threadIdx.x == 0) sums[static_cast<int64_t>(blockIdx.x) * K + k] = sum;
  }
}

template <int K, class... Columns, class Context, class F>
void foreach_fold(const Context& context, const TensorTable& table, const F& functor,
                  double* sums) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  Partials<kFoldChunk> partials(context, table, K);
  for_each_batch<sizeof...(Columns), kFoldChunk>(
      context, table, [&]<class Batch>(const Batch& batch) {
        launch<foreach_fold_chunks<Batch::kLong, K, F, Columns...>>(
            blocks_of(batch), dim3(kForeachThreads), 0, context.stream(), batch, partials, functor);
        context.check_launch("foreach_fold_chunks");
      });
  if (table.tensors() == 0) return;
  launch<foreach_fold_tensors<K, Own, F>>(dim3(static_cast<unsigned>(table.tensors())),
                                          dim3(kForeachThreads), 0, context.stream(), partials,
                                          sums, functor);
  context.check_launch("foreach_fold_tensors");
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
