// foreach on a GPU: launches over as many tensors as fit into kernel parameters, 16 bytes a thread.
#pragma once

#include <utility>

#include "apex/engine/batches_gpu.h"
#include "apex/engine/columns.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements of a block, in packs of n.
APEX_HD constexpr int64_t foreach_elements(int n) {
  return int64_t{kForeachThreads} * kForeachPacks * n;
}

// Loads and stores of one column, N elements at once where there are as many.
template <class T, int N, class Column>
struct ColumnPacks {
  using S = typename Column::storage;

  APEX_DEVICE static S* at(void* data, int64_t offset) { return static_cast<S*>(data) + offset; }

  APEX_DEVICE static bool aligned(void* data) { return is_aligned<N>(at(data, 0)); }

  APEX_DEVICE static void load(void* data, int64_t offset, T (&values)[N], int count,
                               Storage = {}) {
    if constexpr (Column::kRead) {
      if (count == N) {
        load_pack(at(data, offset), values);
      } else {
        load_some(at(data, offset), values, count);
      }
    }
  }

  APEX_DEVICE static void store(void* data, int64_t offset, const T (&values)[N], int count,
                                Storage = {}) {
    if constexpr (Column::kWritten) {
      if (count == N) {
        store_pack(at(data, offset), values);
      } else {
        store_some(at(data, offset), values, count);
      }
    }
  }
};

// The same where only the table knows the storage.
template <class T, int N, template <class> class Access>
struct ColumnPacks<T, N, Access<AnyFloat>> {
  APEX_DEVICE static bool aligned(void* data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }

  APEX_DEVICE static void load(void* data, int64_t offset, T (&values)[N], int count,
                               Storage storage) {
    dispatch_storage(storage, [&]<class S>() {
      ColumnPacks<T, N, Access<S>>::load(data, offset, values, count);
    });
  }

  APEX_DEVICE static void store(void* data, int64_t offset, const T (&values)[N], int count,
                                Storage storage) {
    dispatch_storage(storage, [&]<class S>() {
      ColumnPacks<T, N, Access<S>>::store(data, offset, values, count);
    });
  }
};

template <class F, int N, class Indices, class... Columns>
struct ForeachKernel;

template <class F, int N, size_t... I, class... Columns>
struct ForeachKernel<F, N, std::index_sequence<I...>, Columns...> {
  using T = typename F::value_type;
  using Number = typename GeneratedNumber<F>::type;
  static constexpr bool kFlags = !std::is_void_v<decltype(call_functor(
      std::declval<const F&>(), Number{}, ((void)I, std::declval<T&>())...))>;

  // kWhole: `offset` is a multiple of N, so that the numbers of a pack are made together.
  template <bool kWhole>
  APEX_DEVICE static int apply(const F& functor, T (&values)[sizeof...(I)][N], int64_t offset,
                               int count) {
    int flags = 0;
    Number numbers[generates_v<F> ? N : 1];
    if constexpr (generates_v<F> && kWhole) {
      functor.generator().fill(static_cast<uint64_t>(offset), numbers);
    } else if constexpr (generates_v<F>) {
      numbers[0] = functor.generator().at(static_cast<uint64_t>(offset));
    }
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if (lane < count) {
        const Number number = generates_v<F> ? numbers[generates_v<F> ? lane : 0] : Number{};
        if constexpr (kFlags) {
          flags |= call_functor(functor, number, values[I][lane]...);
        } else {
          call_functor(functor, number, values[I][lane]...);
        }
      }
    }
    return flags;
  }

  // All packs of one thread: every load is issued before the first is used.
  APEX_DEVICE static int run(const F& functor, void* const* data,
                             const Array<Storage, sizeof...(I)>& storage, int64_t begin,
                             int64_t numel) {
    T values[kForeachPacks][sizeof...(I)][N];
    bool aligned = (ColumnPacks<T, N, Columns>::aligned(data[I]) && ...);
    if (!aligned) return run_unaligned(functor, data, storage, begin, numel);
    int flags = 0;
#pragma unroll
    for (int k = 0; k < kForeachPacks; ++k) {
      int64_t offset = begin + (threadIdx.x + static_cast<int64_t>(k) * kForeachThreads) * N;
      int count = static_cast<int>(min(static_cast<int64_t>(N), numel - offset));
      if (count > 0)
        (ColumnPacks<T, N, Columns>::load(data[I], offset, values[k][I], count, storage[I]), ...);
    }
#pragma unroll
    for (int k = 0; k < kForeachPacks; ++k) {
      int64_t offset = begin + (threadIdx.x + static_cast<int64_t>(k) * kForeachThreads) * N;
      int count = static_cast<int>(min(static_cast<int64_t>(N), numel - offset));
      if (count > 0) {
        flags |= apply<true>(functor, values[k], offset, count);
        (ColumnPacks<T, N, Columns>::store(data[I], offset, values[k][I], count, storage[I]), ...);
      }
    }
    return flags;
  }

  APEX_DEVICE static int run_unaligned(const F& functor, void* const* data,
                                       const Array<Storage, sizeof...(I)>& storage, int64_t begin,
                                       int64_t numel) {
    int flags = 0;
    int64_t end = min(begin + foreach_elements(N), numel);
    for (int64_t offset = begin + threadIdx.x; offset < end; offset += kForeachThreads) {
      T values[sizeof...(I)][N];
      (ColumnPacks<T, N, Columns>::load(data[I], offset, values[I], 1, storage[I]), ...);
      flags |= apply<false>(functor, values, offset, 1);
      (ColumnPacks<T, N, Columns>::store(data[I], offset, values[I], 1, storage[I]), ...);
    }
    return flags;
  }
};

// Room for a T in shared memory, whose variables must not have constructors.
template <class T>
struct alignas(16) RawStorage {
  char bytes[sizeof(T)];
};

template <class Prepared, int N, class F, class... Columns>
__global__ void APEX_LAUNCH_BOUNDS(kForeachThreads, kForeachResidentBlocks)
    foreach_kernel(ForeachBatch<sizeof...(Columns), foreach_elements(N)> batch, F functor) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  using Kernel = ForeachKernel<Own, N, std::index_sequence_for<Columns...>, Columns...>;
  // One thread prepares: bias corrections take a pow() in double, slow on most GPUs.
  APEX_SHARED(RawStorage<Prepared>, shared);
  if (skipped(functor)) return;  // the same for all threads: nobody waits at the barrier
  if (threadIdx.x == 0) *reinterpret_cast<Prepared*>(shared.bytes) = prepared(functor);
  __syncthreads();
  const Prepared plain = *reinterpret_cast<const Prepared*>(shared.bytes);

  const int tensor = batch.tensor_of_block();
  int64_t begin = batch.begin_of_block(tensor);
  const Own own = of_tensor(plain, batch.first_tensor + tensor);
  int flags = Kernel::run(own, batch.data[tensor], batch.storage, begin, batch.numel[tensor]);
  if constexpr (Kernel::kFlags) {
    if (flags) *plain.flag = 1;  // every thread writes the same value
  }
}

template <class... Columns, class Context, class F>
void foreach(const Context& context, const TensorTable& table, const F& functor) {
  using Prepared = decltype(prepared(functor));
  constexpr int N = pack_size<typename Columns::storage...>();
  for_each_batch<sizeof...(Columns), foreach_elements(N)>(table, [&](const auto& batch) {
    if (batch.blocks == 0) return;  // tensors without elements
    launch<foreach_kernel<Prepared, N, F, Columns...>>(blocks_of(batch), dim3(kForeachThreads), 0,
                                                       context.stream(), batch, functor);
    context.check_launch("foreach");
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
