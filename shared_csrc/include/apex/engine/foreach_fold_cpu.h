// foreach_fold on the CPU: one parallel region over chunks of fixed size, added in order.
#pragma once

#include <tuple>

#include "apex/engine/chunks_cpu.h"
#include "apex/engine/foreach_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Packs whose terms a lane adds up by themselves: more would lose digits of float64.
inline constexpr int64_t kFoldRun = 32;

template <int K, class F, class Indices, class... Columns>
struct FoldLoop;

template <int K, class F, size_t... I, class... Columns>
struct FoldLoop<K, F, std::index_sequence<I...>, Columns...> {
  using T = typename F::value_type;

  // By value and inline, so that the compiler sees that the pointers are the loop's own.
  template <class... Pointers>
  APEX_HD static void apply(const F functor, int count, double (&sums)[K][kPack],
                            Pointers... lanes) {
    APEX_VECTORIZE
    for (int lane = 0; lane < count; ++lane) {
      T values[sizeof...(I)] = {ColumnLanes<T, Columns>::read(lanes, lane)...};
      double terms[K];
      functor(terms, values[I]...);
      (ColumnLanes<T, Columns>::write(lanes, lane, values[I]), ...);
      for (int k = 0; k < K; ++k) {
        sums[k][lane] = fold_terms<F>(sums[k][lane], terms[k]);
      }
    }
  }

  // Adds the terms of elements [begin, end), which are a run, to `totals`.
  static void add_run(const F& functor, void* const* data,
                      const Array<Storage, sizeof...(I)>& storage, int64_t begin, int64_t end,
                      double (&totals)[K][kPack]) {
    alignas(64) T buffers[sizeof...(I)][kPack];
    alignas(64) double sums[K][kPack] = {};
    for (int64_t i = begin; i < end; i += kPack) {
      int count = static_cast<int>(std::min<int64_t>(kPack, end - i));
      (ColumnLanes<T, Columns>::fill(data[I], i, count, buffers[I], storage[I]), ...);
      auto pointers = std::make_tuple(ColumnLanes<T, Columns>::of(data[I], i, buffers[I])...);
      // A constant count for whole packs: no masks, no remainder.
      if (count == kPack) {
        apply(functor, kPack, sums, std::get<I>(pointers)...);
      } else {
        apply(functor, count, sums, std::get<I>(pointers)...);
      }
      (ColumnLanes<T, Columns>::drain(data[I], i, count, buffers[I], storage[I]), ...);
    }
    for (int k = 0; k < K; ++k) {
      for (int lane = 0; lane < kPack; ++lane) {
        totals[k][lane] = fold_terms<F>(totals[k][lane], sums[k][lane]);
      }
    }
  }

  // The sums of elements [begin, end) of one tensor.
  static void run(const F& functor, void* const* data, const Array<Storage, sizeof...(I)>& storage,
                  int64_t begin, int64_t end, double* result) {
    alignas(64) double totals[K][kPack] = {};
    for (int64_t i = begin; i < end; i += kFoldRun * kPack) {
      add_run(functor, data, storage, i, std::min(i + kFoldRun * kPack, end), totals);
    }
    for (int k = 0; k < K; ++k) {
      for (int half = kPack / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) {
          totals[k][lane] = fold_terms<F>(totals[k][lane], totals[k][lane + half]);
        }
      }
      result[k] = totals[k][0];
    }
  }
};

template <int K, class... Columns, class Context, class F>
void foreach_fold(const Context& context, const TensorTable& table, const F& functor,
                  double* sums) {
  using Own = decltype(of_tensor(prepared(functor), 0));
  using Loop = FoldLoop<K, Own, std::index_sequence_for<Columns...>, Columns...>;
  if (table.tensors() == 0 || skipped(functor)) return;
  const auto plain = prepared(functor);
  const auto storage = table.storages<sizeof...(Columns)>();

  std::vector<double> partials;
  auto first_chunk = for_each_chunk(
      context, table, kFoldChunk, kForeachGrain,
      [&](int64_t chunks) { partials.resize(chunks * K); },
      [&](int64_t t, int64_t index, int64_t begin, int64_t end) {
        Loop::run(of_tensor(plain, t), table.row(t), storage, begin, end,
                  partials.data() + index * K);
      });

  for (int64_t t = 0; t < table.tensors(); ++t) {
    for (int k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t c = first_chunk[t]; c < first_chunk[t + 1]; ++c) {
        sum = fold_terms<Own>(sum, partials[c * K + k]);
      }
      sums[t * K + k] = sum;
    }
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
