// foreach on a GPU: launches over as many tensors as fit into kernel parameters, 16 bytes a thread.
#pragma once

#include <utility>

#include "apex/engine/batches_gpu.h"
#include "apex/engine/lists_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements of a block.
template <class... Columns>
constexpr int64_t foreach_elements() {
  constexpr int N = pack_size<typename Columns::storage...>();
  return int64_t{kForeachThreads} * packs_under_way<N, kForeachPacks, Columns...>() * N;
}

// The functor of one tensor, called for elements that are counted from `begin` on.
template <class F, int N>
struct ForeachBody {
  using Number = typename GeneratedNumber<F>::type;
  const F& functor;
  int64_t begin;
  int flags = 0;
  Number numbers[generates_v<F> ? N : 1] = {};

  template <class... Values>
  APEX_DEVICE void operator()(int pack, int first, int lane, Values&... values) {
    if constexpr (generates_v<F>) {
      // A pack begins at a multiple of N: its numbers are made together.
      const uint64_t index = static_cast<uint64_t>(begin + first);
      if (pack == kNoPack) {
        numbers[lane] = functor.generator().at(index);
      } else if (lane == 0) {
        functor.generator().fill(index, numbers);
      }
    }
    const Number number = numbers[generates_v<F> ? lane : 0];
    if constexpr (std::is_void_v<decltype(call_functor(functor, number, values...))>) {
      call_functor(functor, number, values...);
    } else {
      flags |= call_functor(functor, number, values...);
    }
  }
};

template <class F, class Batch, class... Views>
APEX_DEVICE void foreach_block(const F& functor, const Batch& batch, int tensor, int64_t begin,
                               const Views&... views) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  constexpr int N = pack_size<typename Views::storage...>();
  ListPart<typename Own::value_type, N, packs_under_way<N, kForeachPacks, Views...>(), true,
           Views...>
  part(batch.elements_of_block(tensor), views...);
  if (skipped(functor)) return;  // the same for all threads: nobody waits at the barrier
  const auto plain = prepared_once(functor);
  const Own own = of_tensor(plain, batch.first_tensor + tensor);
  ForeachBody<Own, N> body{own, begin};
  part.each([&](auto&&... arguments) { body(arguments...); }, views...);
  if constexpr (requires { *plain.flag = 1; }) {
    if (body.flags) *plain.flag = 1;  // every thread writes the same value
  }
}

template <bool kLong, class F, class... Columns>
__global__ void APEX_LAUNCH_BOUNDS(kForeachThreads, kForeachResidentBlocks)
    foreach_kernel(ForeachBatch<sizeof...(Columns), foreach_elements<Columns...>(), kLong> batch,
                   F functor) {
  wait_for_kernels_before();
  batch.template with_views<ColumnView<Columns>...>(
      [&](int tensor, int64_t begin, const auto&... views) {
        foreach_block(functor, batch, tensor, begin, views...);
      });
}

template <class... Columns, class Context, class F>
void foreach(const Context& context, const TensorTable& table, const F& functor) {
  constexpr int64_t kElements = foreach_elements<Columns...>();
  for_each_batch<sizeof...(Columns), kElements>(
      context, table, [&]<class Batch>(const Batch& batch) {
        if (batch.blocks() == 0) return;  // tensors without elements
        launch<foreach_kernel<Batch::kLong, F, Columns...>>(blocks_of(batch), dim3(kForeachThreads),
                                                            0, context.stream(), batch, functor);
        context.check_launch("foreach");
      });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
