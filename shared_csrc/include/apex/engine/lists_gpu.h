// The tensors of lists on a GPU: what a block has of one of them, in packs of 16 bytes.
#pragma once

#include <utility>

#include "apex/core/gpu.h"
#include "apex/engine/columns.h"
#include "apex/engine/packs_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// A column of one tensor, from the block's first element on.
template <class Column>
struct ColumnView {
  using storage = typename Column::storage;
  static constexpr bool kRead = Column::kRead, kWritten = Column::kWritten;
  storage* data;

  APEX_DEVICE ColumnView(void* tensor, int64_t begin, Storage = {})
      : data(static_cast<storage*>(tensor) + begin) {}
};

// The same where only the table knows the storage.
template <template <class> class Access>
struct ColumnView<Access<AnyFloat>> {
  using storage = AnyFloat;
  static constexpr bool kRead = Access<AnyFloat>::kRead, kWritten = Access<AnyFloat>::kWritten;
  char* data;
  Storage type;

  APEX_DEVICE ColumnView(void* tensor, int64_t begin, Storage type)
      : data(static_cast<char*>(tensor) + begin * bytes(type)), type(type) {}

  APEX_DEVICE static int bytes(Storage type) {
    return type == Storage::kFloat8 ? 1 : type == Storage::kFloat ? 4 : 2;
  }
  APEX_DEVICE char* at(int64_t offset) const { return data + offset * bytes(type); }
};

// Bytes that are read are loaded one by one: packs of 8 bytes would need a branch of their own.
template <int N, template <class> class Access>
APEX_DEVICE bool view_aligned(const ColumnView<Access<AnyFloat>>& view) {
  if (Access<AnyFloat>::kRead && view.type == Storage::kFloat8) return false;
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

template <int N, class T, template <class> class Access>
APEX_DEVICE void store_view(bool aligned, const ColumnView<Access<AnyFloat>>& view, int64_t offset,
                            const T (&values)[N]) {
  dispatch_storage(view.type, [&]<class S>() {
    S* target = reinterpret_cast<S*>(view.at(offset));
    if (aligned) {
      store_pack(target, values);
    } else {
      store_some(target, values, N);
    }
  });
}

// Loads as they are stored, without a branch that would wait for them: 16 bytes, and 16 more of
// float32.
template <class T, int N, int kUnderWay, template <class> class Access>
  requires(Access<AnyFloat>::kRead)
struct LoadedPacks<T, N, kUnderWay, ColumnView<Access<AnyFloat>>> {
  using View = ColumnView<Access<AnyFloat>>;
  StoredPack<float, N> packs[kUnderWay];

  template <bool kAligned>
  APEX_DEVICE void load(const View& view, int64_t offset, int u) {
    const char* from = view.at(offset);
    if constexpr (N == 1) {
      dispatch_storage(view.type, [&]<class S>() {
        packs[u].set(0, convert<float>(*reinterpret_cast<const S*>(from)));
      });
    } else {
      using Half16 = Vector<unsigned, N / 2>;
      static_assert(sizeof(Half16) == 16);
      const Half16 first = *reinterpret_cast<const Half16*>(from);
      memcpy(packs[u].words, &first, sizeof(first));
      if (view.type == Storage::kFloat) {
        const Half16 second = *reinterpret_cast<const Half16*>(from + sizeof(first));
        memcpy(packs[u].words + N / 2, &second, sizeof(second));
      }
    }
  }

  APEX_DEVICE void values(const View& view, int64_t, int u, int, T (&into)[N]) const {
    if constexpr (N == 1) {
      packs[u].values(into);
    } else {
      dispatch_storage(view.type, [&]<class S>() {
        StoredPack<S, N> pack;
        memcpy(pack.words, packs[u].words, sizeof(pack.words));
        pack.values(into);
      });
    }
  }
};

// The first `count` elements of the views, which are a block's. Once made, its first packs are
// under way, while the block finds out what to do with them: each() is called later. kOneTurn:
// there are no more than these.
template <class T, int N, int kPacks, bool kOneTurn, class... Views>
class ListPart {
  static constexpr int kStride = kForeachThreads * N;

 public:
  APEX_DEVICE ListPart(int count, const Views&... views)
      : count_(count), aligned_((view_aligned<N>(views) && ...)) {
    if (aligned_) load(threadIdx.x * N, views...);
  }

  // body(u, first, lane, values...) for every element: the lane-th of the pack that begins at
  // `first`, and is the u-th under way; kNoPack where elements fill none.
  template <class Body>
  APEX_DEVICE void each(const Body& body, const Views&... views) {
    int own = threadIdx.x * N;
    if (aligned_) {
#pragma unroll 1
      while (true) {
        auto of_pack = [&](int u, int lane, auto&... values) {
          body(u, own + u * kStride, lane, values...);
        };
        operands_.use(true, 0, has(own), at(own), of_pack, views...);
        own += kPacks * kStride;
        if (kOneTurn || own >= count_) break;
        load(own, views...);
      }
    }
    singles(aligned_ ? count_ / N * N : 0, body, views...);
  }

 private:
  APEX_DEVICE auto has(int own) const {
    return [=, count = count_](int u) { return own + u * kStride + N <= count; };
  }
  APEX_DEVICE static auto at(int own) {
    return [=](const auto&, int u) { return own + u * kStride; };
  }
  APEX_DEVICE void load(int own, const Views&... views) {
    operands_.template load<true>(has(own), at(own), views...);
  }

  // By neighbours those of neighbours.
  template <class Body>
  APEX_DEVICE void singles(int from, const Body& body, const Views&... views) const {
#pragma unroll 1
    for (int own = from + threadIdx.x; own < count_; own += kPacks * kForeachThreads) {
      Operands<T, 1, kPacks, std::index_sequence_for<Views...>, Views...> operands;
      operands.run(
          true, 0, [&](int u) { return own + u * kForeachThreads < count_; },
          [&](const auto&, int u) { return own + u * kForeachThreads; },
          [&](int u, int lane, auto&... values) {
            body(int{kNoPack}, own + u * kForeachThreads, lane, values...);
          },
          views...);
    }
  }

  int count_;
  bool aligned_;
  Operands<T, N, kPacks, std::index_sequence_for<Views...>, Views...> operands_;
};

// Room for a T in shared memory, whose variables must not have constructors.
template <class T>
struct alignas(16) RawStorage {
  char bytes[sizeof(T)];
};

// prepared() by one thread, for all of the block: bias corrections take a pow() in double, slow on
// most GPUs.
template <class F>
APEX_DEVICE auto prepared_once(const F& functor) {
  if constexpr (requires { functor.prepare(); }) {
    using Prepared = decltype(prepared(functor));
    APEX_SHARED(RawStorage<Prepared>, shared);
    if (threadIdx.x == 0) *reinterpret_cast<Prepared*>(shared.bytes) = prepared(functor);
    __syncthreads();
    return *reinterpret_cast<const Prepared*>(shared.bytes);
  } else {
    return functor;
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
