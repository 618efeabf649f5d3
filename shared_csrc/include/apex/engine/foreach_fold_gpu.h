// foreach_fold on a GPU: a block per chunk leaves its partial sums, then one block per tensor adds
// them.
#pragma once

#include "apex/engine/foreach_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <int K, class F, int N, class Indices, class... Columns>
struct FoldKernel;

template <int K, class F, int N, size_t... I, class... Columns>
struct FoldKernel<K, F, N, std::index_sequence<I...>, Columns...> {
  using T = typename F::value_type;

  // One pack, or the part of it that there is.
  APEX_DEVICE static void add(const F& functor, void* const* data,
                              const Array<Storage, sizeof...(I)>& storage, int64_t offset,
                              int count, double (&sums)[K]) {
    T values[sizeof...(I)][N];
    (ColumnPacks<T, N, Columns>::load(data[I], offset, values[I], count, storage[I]), ...);
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if (lane < count) {
        double terms[K];
        functor(terms, values[I][lane]...);
#pragma unroll
        for (int k = 0; k < K; ++k) sums[k] = fold_terms<F>(sums[k], terms[k]);
      }
    }
    (ColumnPacks<T, N, Columns>::store(data[I], offset, values[I], count, storage[I]), ...);
  }

  // The calling thread's share of elements [begin, end).
  APEX_DEVICE static void run(const F& functor, void* const* data,
                              const Array<Storage, sizeof...(I)>& storage, int64_t begin,
                              int64_t end, double (&sums)[K]) {
    bool aligned = (ColumnPacks<T, N, Columns>::aligned(data[I]) && ...);
    const int step = aligned ? N : 1;
    for (int64_t i = begin + threadIdx.x * step; i < end; i += int64_t{kForeachThreads} * step) {
      int count = static_cast<int>(min(static_cast<int64_t>(step), end - i));
      add(functor, data, storage, i, count, sums);
    }
  }
};

template <int K, class Prepared, int N, class F, class... Columns>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_fold_chunks(ForeachBatch<sizeof...(Columns), kFoldChunk> batch,
                        Partials<kFoldChunk> partials, F functor) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  using Kernel = FoldKernel<K, Own, N, std::index_sequence_for<Columns...>, Columns...>;
  // One thread prepares: bias corrections take a pow() in double, slow on most GPUs.
  APEX_SHARED(RawStorage<Prepared>, shared);
  if (skipped(functor)) return;  // the same for all threads: nobody waits at the barrier
  partials.locate(batch);
  if (threadIdx.x == 0) *reinterpret_cast<Prepared*>(shared.bytes) = prepared(functor);
  __syncthreads();
  const Prepared plain = *reinterpret_cast<const Prepared*>(shared.bytes);

  const int tensor = batch.tensor_of_block();
  int64_t begin = batch.begin_of_block(tensor);
  int64_t end = min(begin + kFoldChunk, batch.numel[tensor]);
  double sums[K] = {};
  Kernel::run(of_tensor(plain, batch.first_tensor + tensor), batch.data[tensor], batch.storage,
              begin, end, sums);
  for (int k = 0; k < K; ++k) {
    double sum = reduce_row(sums[k], FoldTerms<Own>{});
    if (threadIdx.x == 0) partials.of_block(batch)[k] = sum;
  }
}

// One block per tensor.
template <int K, class Own, class F>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_fold_tensors(Partials<kFoldChunk> partials, double* sums, F functor) {
  if (skipped(functor)) return;
  for (int k = 0; k < K; ++k) {
    double sum = partials.combined(blockIdx.x, k, FoldTerms<Own>{});
    if (threadIdx.x == 0) sums[static_cast<int64_t>(blockIdx.x) * K + k] = sum;
  }
}

template <int K, class... Columns, class Context, class F>
void foreach_fold(const Context& context, const TensorTable& table, const F& functor,
                  double* sums) {
  using Prepared = decltype(prepared(functor));
  using Own = decltype(of_tensor(prepared(functor), 0));
  constexpr int N = pack_size<typename Columns::storage...>();
  Partials<kFoldChunk> partials(context, table, K);
  for_each_batch<sizeof...(Columns), kFoldChunk>(table, [&](const auto& batch) {
    launch<foreach_fold_chunks<K, Prepared, N, F, Columns...>>(
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
