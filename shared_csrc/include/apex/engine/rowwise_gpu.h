// Row programs on a GPU: 8 to 32 lanes per row for short rows, a block per row for long ones.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "apex/core/gpu.h"
#include "apex/core/gpu_shapes.h"
#include "apex/engine/packs_gpu.h"
#include "apex/engine/row_concepts.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

inline constexpr int kPacksPerPart = 4;  // of a sum

// A thread's terms of a sum in two stages: were each added to the total, a large one would swallow
// the digits of all that follow.
template <class T>
class TwoStageSum {
 public:
  // Call before a pack's first term.
  APEX_DEVICE void begin_pack() {
    if (++packs_ <= kPacksPerPart) return;
    packs_ = 1;
    total_ += part_;
    part_ = T(0);
  }
  APEX_DEVICE void add(T term) { part_ += term; }
  APEX_DEVICE T get() const { return total_ + part_; }

 private:
  T total_ = T(0), part_ = T(0);
  int packs_ = 0;
};

template <class T>
class Row {
 public:
  APEX_DEVICE Row(int64_t columns, T* scratch, int64_t scratch_stride)
      : width_(columns), columns_(columns), scratch_(scratch), scratch_stride_(scratch_stride) {}

  APEX_DEVICE void move_to(int64_t index) { index_ = index; }
  APEX_DEVICE int64_t index() const { return index_; }
  APEX_DEVICE int64_t columns() const { return columns_; }

  APEX_DEVICE Row within(int64_t begin, int64_t end) const {
    Row window = *this;
    window.begin_ += begin;
    window.columns_ = end - begin;
    return window;
  }

  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix) const {
    return in(matrix, width_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride + begin_};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix, int64_t stride) const {
    return {matrix + index_ * stride + begin_};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix) const {
    return out(matrix, width_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> from(const S* address, int64_t next = 0) const {
    return {address + begin_, next};
  }
  template <class S>
  APEX_DEVICE WriteView<S> to(S* address, int64_t next = 0) const {
    return {address + begin_, next};
  }
  template <class S>
  APEX_DEVICE ReadView<S> shared(const S* vector) const {
    return {vector + begin_};
  }

  template <class Numbers>
  APEX_DEVICE GeneratedView<Numbers> generated(const Numbers& numbers) const {
    return generated_view(numbers, index_, width_);
  }

  template <class View>
  APEX_DEVICE View ahead(const View& view) const {
    return view;
  }

  template <class S>
  APEX_DEVICE StagedView<S, T> stage(int slot, const S* matrix) const {
    ReadView<S> source = in(matrix);
    if (scratch_ == nullptr) return {source.data, nullptr};
    T* into = scratch_ + slot * scratch_stride_;
    sync();  // the row before is no longer read
    each([](T x, T& y) { y = x; }, source, WriteView<T>{into});
    sync();
    return {source.data, into};
  }

  // What `each` writes to `matrix`, staged as it reads from there.
  template <class S, class F, class... Views>
  APEX_DEVICE StagedView<S, T> stage_result(int slot, S* matrix, const F& functor,
                                            const Views&... views) const {
    WriteView<S> stored = out(matrix);
    T* into = scratch_ == nullptr ? nullptr : scratch_ + slot * scratch_stride_;
    sync();  // the row before is no longer read
    if (into == nullptr) {
      each(functor, stored, views...);
    } else {
      each(
          [&](T& result, T& kept, auto... values) {
            functor(result, values...);
            kept = convert<T>(convert<S>(result));
          },
          stored, WriteView<T>{into}, views...);
    }
    sync();
    return {stored.data, into};
  }

  template <class F, class... Views>
  APEX_DEVICE T sum(const F& functor, const Views&... views) const {
    TwoStageSum<T> own;
    terms(
        [&](auto& pack, int lane, bool begins) {
          if (begins) own.begin_pack();
          own.add(pack.call(functor, lane));
        },
        views...);
    return reduce_row(own.get(), Add{});
  }

  template <int N, class F, class... Views>
  APEX_DEVICE Array<T, N> sums(const F& functor, const Views&... views) const {
    Array<T, N> totals{};
    terms(
        [&](auto& pack, int lane, bool) {
          Array<T, N> terms = pack.call(functor, lane);
#pragma unroll
          for (int n = 0; n < N; ++n) totals[n] += terms[n];
        },
        views...);
#pragma unroll
    for (int n = 0; n < N; ++n) totals[n] = reduce_row(totals[n], Add{});
    return totals;
  }

  // As on the CPU, but terms are computed again: keeping them would take memory of the block.
  template <class F, class Use, class... Views>
  APEX_DEVICE void with_terms(const F& term, const Use& use, const Views&... views) const {
    use(sum(term, views...), [&](const auto& functor, const auto&... others) {
      if constexpr (sizeof...(others) == 1) {
        auto of_one = [&](T& a, auto&... values) { functor(a, term(values...)); };
        each(of_one, others..., views...);
      } else {
        static_assert(sizeof...(others) == 3);
        auto of_three = [&](T& a, T& b, T& c, auto&... values) {
          functor(a, b, c, term(values...));
        };
        each(of_three, others..., views...);
      }
    });
  }

  // On a GPU the column sums have a launch of their own.
  template <int N, int M, class F, class C, class... Views>
  APEX_DEVICE Array<T, N> sums_and_columns(const F& functor, const C&,
                                           const Views&... views) const {
    return sums<N>(functor, views...);
  }

  // A number near the row's mean, as on the CPU: here of its first columns that one load brings.
  template <class S>
  APEX_DEVICE T pivot(const StagedView<S, T>& view) const {
    constexpr int kFirst = 4;
    auto at = [&](int i) { return view.staged ? view.staged[i] : convert<T>(view.data[i]); };
    if (columns_ < kFirst) return columns_ == 0 ? T(0) : at(0);
    T sum = T(0);
#pragma unroll
    for (int i = 0; i < kFirst; ++i) sum += at(i);
    return sum / T(kFirst);
  }

  template <class F, class... Views>
  APEX_DEVICE T max(const F& functor, const Views&... views) const {
    T largest = -std::numeric_limits<T>::infinity();
    pass([&](auto& pack, int lane) { largest = larger(pack.call(functor, lane), largest); },
         views...);
    return reduce_row(largest, Max{});
  }

  template <int N, class F, class Merge, class... Views>
  APEX_DEVICE Array<T, N> fold(const Array<T, N>& empty, const F& functor, const Merge& merge,
                               const Views&... views) const {
    Array<T, N> state = empty;
    terms([&](auto& pack, int lane, bool) { pack.call_into(functor, state, lane); }, views...);
    return reduce_row(state, merge);
  }

  template <class F, class... Views>
  APEX_DEVICE void each(const F& functor, const Views&... views) const {
    pass([&](auto& pack, int lane) { pack.call(functor, lane); }, views...);
  }

  template <class F, class... Views>
  APEX_DEVICE void each_of(int64_t count, const F& functor, Views... views) const {
    // Where a run is narrower than the row's threads, these share out the runs.
    constexpr int N = pack_size<typename Views::storage...>();
    int lanes = 1;
    while (lanes < blockDim.x && static_cast<int64_t>(lanes) * N < columns_) lanes *= 2;
    const int lane_of_run = threadIdx.x % lanes, first = threadIdx.x / lanes;
    const int at_once = blockDim.x / lanes;
    ((views.data += first * views.next_row), ...);
    for (int64_t run = first; run < count; run += at_once) {
      pass_of(
          lane_of_run, lanes, [&](auto& pack, int lane) { pack.call(functor, lane); }, views...);
      ((views.data += at_once * views.next_row), ...);
    }
  }

  // By the thread that had this column in `each`, so that no barrier is needed between them.
  template <class F, class... Views>
  APEX_DEVICE void at(int64_t column, const F& functor, const Views&... views) const {
    constexpr int N = pack_size<typename Views::storage...>();
    bool aligned = (view_aligned<N>(views) && ...);
    if ((aligned ? column / N : column) % blockDim.x != threadIdx.x) return;
    GpuPack<T, 1, std::index_sequence_for<Views...>, Views...> pack;
    pack.load_all(column, 1, views...);
    pack.call(functor, 0);
    pack.store_all(column, 1, views...);
  }

  template <class F>
  APEX_DEVICE void once(const F& f) const {
    if (threadIdx.x == 0) f();
  }

 private:
  APEX_DEVICE void sync() const {
    if (blockDim.x <= kGroupLanes) {
      sync_group();
    } else {
      __syncthreads();
    }
  }

  // body(pack, lane, begins) for every element of this thread, of the same ones wherever the row
  // lies, so that a sum has the same bits. `begins` says that a whole pack does.
  template <class Body, class... Views>
  APEX_DEVICE void terms(const Body& body, const Views&... views) const {
    constexpr int N = pack_size<typename Views::storage...>();
    if ((view_aligned<N>(views) && ...)) {
      pass_packs<N>(
          threadIdx.x, blockDim.x, [&](auto& pack, int lane) { body(pack, lane, lane == 0); },
          views...);
      return;
    }
    GpuPack<T, 1, std::index_sequence_for<Views...>, Views...> single;
    int64_t column = static_cast<int64_t>(threadIdx.x) * N;
#pragma unroll 1
    for (; column < columns_; column += static_cast<int64_t>(blockDim.x) * N) {
      const bool is_whole = column + N <= columns_;
      const int count = is_whole ? N : static_cast<int>(columns_ - column);
#pragma unroll 1
      for (int lane = 0; lane < count; ++lane) {
        single.load_all(column + lane, 1, views...);
        body(single, 0, lane == 0 || !is_whole);
        single.store_all(column + lane, 1, views...);
      }
    }
  }

  // body(pack, lane) for every element of this thread; packs where memory is aligned.
  template <class Body, class... Views>
  APEX_DEVICE void pass(const Body& body, const Views&... views) const {
    pass_of(threadIdx.x, blockDim.x, body, views...);
  }

  // The same for a row that only so many threads share, of which this one is `thread`.
  template <class Body, class... Views>
  APEX_DEVICE void pass_of(int thread, int threads, const Body& body, const Views&... views) const {
    constexpr int N = pack_size<typename Views::storage...>();
    bool aligned = (view_aligned<N>(views) && ...);
    if (aligned) {
      pass_packs<N>(thread, threads, body, views...);
    } else {
      pass_packs<1>(thread, threads, body, views...);
    }
  }

  // Whole packs ask no lane whether it has an element.
  template <int N, class Body, class... Views>
  APEX_DEVICE void pass_packs(int thread, int threads, const Body& body,
                              const Views&... views) const {
    GpuPack<T, N, std::index_sequence_for<Views...>, Views...> pack;
    int64_t column = static_cast<int64_t>(thread) * N;
    const int64_t stride = static_cast<int64_t>(threads) * N;
    for (; column + N <= columns_; column += stride) {
      pack.load_all(column, N, views...);
#pragma unroll
      for (int lane = 0; lane < N; ++lane) body(pack, lane);
      pack.store_all(column, N, views...);
    }
    if constexpr (N > 1) {
      // What fills no pack, by its thread alone: where rows have such a rest, few are aligned.
      GpuPack<T, 1, std::index_sequence_for<Views...>, Views...> single;
#pragma unroll 1
      for (; column < columns_; ++column) {
        single.load_all(column, 1, views...);
        body(single, 0);
        single.store_all(column, 1, views...);
      }
    }
  }

  int64_t index_ = 0;
  int64_t width_, begin_ = 0, columns_;  // of the operands, and of the window that is seen
  T* scratch_;  // [kStages, scratch_stride] of this row in shared memory, or null
  int64_t scratch_stride_;
};

template <class Program>
constexpr int stages_of() {
  if constexpr (requires { Program::kStages; }) return Program::kStages;
  return 0;
}

template <class Program>
__global__ void APEX_LAUNCH_BOUNDS(kRowwiseThreads, kRowwiseResidentBlocks)
    rowwise_kernel(int64_t rows, int64_t columns, int64_t scratch_stride, Program program) {
  using T = typename Program::value_type;
  APEX_DYNAMIC_SHARED(dynamic_shared);
  T* scratch = nullptr;
  if (scratch_stride > 0) {
    scratch =
        reinterpret_cast<T*>(dynamic_shared) + threadIdx.y * stages_of<Program>() * scratch_stride;
  }
  Row<T> row(columns, scratch, scratch_stride);
  int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; index < rows;
       index += step) {
    row.move_to(index);
    program.row(row);
  }
}

// As many as have a pack each. A program of many runs a row, see each_of(), shares them out.
template <class Program>
int threads_per_row(int64_t columns) {
  if (columns > kWideColumns) return kRowwiseThreads;
  if (columns > kGroupColumns) return kGroupThreads;
  if constexpr (requires { Program::kManyRuns; }) return kGroupLanes;
  int lanes = kFewestLanes;
  while (lanes < kGroupLanes && lanes * 4 < columns) lanes *= 2;
  return lanes;
}

template <class P>
concept RowProgram = RowProgramOn<P, Row<typename P::value_type>>;

template <class Context, RowProgram Program>
void rowwise(const Context& context, int64_t rows, int64_t columns, const Program& program) {
  using T = typename Program::value_type;
  if (rows == 0) return;
  const int threads = threads_per_row<Program>(columns);
  const dim3 block(threads, threads <= kGroupLanes ? kGroupThreads / threads : 1);
  int64_t blocks = std::min((rows + block.y - 1) / block.y, kRowwiseBlocks);
  // A multiple of 8 elements keeps every slot aligned for 16-byte vectors.
  int64_t stride = (columns + 7) / 8 * 8;
  size_t shared_bytes = block.y * stages_of<Program>() * stride * sizeof(T);
  if (shared_bytes > kSharedBytes - kSharedVariableBytes || stages_of<Program>() == 0) {
    stride = 0;
    shared_bytes = 0;
  }
  launch<rowwise_kernel<Program>>(dim3(static_cast<unsigned>(blocks)), block, shared_bytes,
                                  context.stream(), rows, columns, stride, program);
  context.check_launch("rowwise");
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
