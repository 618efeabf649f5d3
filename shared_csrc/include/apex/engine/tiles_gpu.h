// Rows of matrices in tiles, on a GPU: a thread has a pack of columns of many rows, in whose loop
// all that several rows need is loaded before it is used.
//
// Of a row, programs use in(), out(), shared() and accumulate() or each().
#pragma once

#include "apex/core/gpu.h"
#include "apex/engine/rowwise_gpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements of a pack of a program's matrices.
template <class Program>
constexpr int matrix_pack() {
  if constexpr (requires { typename Program::matrix_type; }) {
    return pack_size<typename Program::matrix_type>();
  } else {
    return staged_pack<Program>();
  }
}

// Whether column_sums() needs numbers of the columns: before(column) makes them, see
// colwise_rowwise.h.
template <class Program>
concept HasBefore = requires { Program::kBefore; };

template <class T, class Program>
inline constexpr bool kMergesIn =
    requires(const Program& program, Array<T, Program::kSums>& sums) { program.merge(sums, sums); };

template <class Program, class T, int N>
APEX_HD void merge_sums(const Program& program, Array<T, N>& total, const Array<T, N>& part) {
  if constexpr (kMergesIn<T, Program>) {
    program.merge(total, part);
  } else {
    for (int n = 0; n < N; ++n) total[n] += part[n];
  }
}

template <class T, class S, int N>
APEX_DEVICE Array<T, N> convert_sums(const Array<S, N>& sums) {
  Array<T, N> result;
  for (int n = 0; n < N; ++n) result[n] = static_cast<T>(sums[n]);
  return result;
}

// A functor for the rows that a thread has under way, from `first` on: the same for all, or one
// that functor(index) makes for the row of this index, before the row is loaded.
template <class F, class Rows>
struct RowFunctors {
  const F& functor;
  APEX_DEVICE RowFunctors(const F& functor, int64_t, int, int64_t) : functor(functor) {}
  APEX_DEVICE const F& operator[](int) const { return functor; }
};
template <class F, size_t... U>
  requires kMadeForRow<F>
struct RowFunctors<F, std::index_sequence<U...>> {
  using OfRow = decltype(std::declval<const F&>()(int64_t{}));
  OfRow of_rows[sizeof...(U)];
  APEX_DEVICE RowFunctors(const F& functor, int64_t first, int step, int64_t last)
      : of_rows{functor(first + static_cast<int>(U) * step < last
                            ? first + static_cast<int>(U) * step
                            : last)...} {}
  APEX_DEVICE const OfRow& operator[](int u) const { return of_rows[u]; }
};

// What a thread has of a matrix: a pack of columns of every `step`-th row. Its passes are loops
// over these rows, of which several are loaded before the first is used; vectors are loaded once.
template <class T, int N>
class ThreadRows {
 public:
  APEX_DEVICE ThreadRows(int64_t columns, int64_t column, int64_t begin, int64_t end, int step)
      : columns_(columns), column_(column), begin_(begin), end_(end), step_(step) {}

  APEX_DEVICE int64_t columns() const { return columns_; }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix) const {
    return in(matrix, columns_);
  }
  template <class S>
  APEX_DEVICE ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix, stride};
  }
  template <class S>
  APEX_DEVICE WriteView<S> out(S* matrix) const {
    return {matrix, columns_};
  }
  template <class S>
  APEX_DEVICE FixedView<S> shared(const S* vector) const {
    return {{vector}};
  }
  template <class View>
  APEX_DEVICE View ahead(const View& view) const {
    return view;
  }

  template <class F, class... Views>
  APEX_DEVICE void each(const F& functor, const Views&... views) const {
    walk(
        functor, [] {}, [](const F& functor, int, auto&... values) { functor(values...); }, [] {},
        views...);
  }

  // Adds to sums of its columns; those of a turn first among themselves, for short chains.
  template <class Program, int K, class F, class... Views>
  APEX_DEVICE void add(const Program& program, Array<T, K> (&sums)[N], const F& functor,
                       const Views&... views) const {
    Array<T, K> turn[N];
    walk(
        functor, [&] { clear(turn); },
        [&](const auto& functor, int lane, auto&... values) { functor(turn[lane], values...); },
        [&] {
#pragma unroll
          for (int lane = 0; lane < N; ++lane) merge_sums(program, sums[lane], turn[lane]);
        },
        views...);
  }

 private:
  template <int K>
  APEX_DEVICE static void clear(Array<T, K> (&sums)[N]) {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) sums[lane] = {};
  }

  // Of a view whose rows begin anywhere, no pack is aligned.
  template <class View>
  APEX_DEVICE static bool aligned(const View& view) {
    return view_aligned<N>(view) && view.next_row % N == 0;
  }

  // Rows are taken in turns of those under way: first(), use(functor, lane, values...) for each
  // number, last().
  template <class F, class First, class Use, class Last, class... Views>
  APEX_DEVICE void walk(const F& functor, const First& first, const Use& use, const Last& last,
                        const Views&... views) const {
    if (begin_ >= end_) return;
    constexpr int kUnderWay = rows_under_way<N, Views...>();
    using Indices = std::index_sequence_for<Views...>;
    if (N == 1 || (aligned(views) && ...)) {
      Operands<T, N, kUnderWay, Indices, Views...> operands;
      operands.load_fixed(true, column_, views...);
#pragma unroll 1
      for (int64_t index = begin_; index < end_; index += kUnderWay * step_) {
        const auto has = [&](int u) { return index + u * step_ < end_; };
        const auto at = [&](const auto& view, int u) { return offset(view, index + u * step_); };
        const RowFunctors<F, std::make_index_sequence<kUnderWay>> functors(functor, index, step_,
                                                                           end_ - 1);
        first();
        operands.template load<true>(has, at, views...);
        operands.use(
            true, 0, has, at,
            [&](int u, int lane, auto&... values) { use(functors[u], lane, values...); }, views...);
        last();
      }
    } else {  // the same in the same order
      Operands<T, N, 1, Indices, Views...> operands;
      operands.load_fixed(false, column_, views...);
      for (int64_t index = begin_; index < end_;) {
        first();
#pragma unroll 1
        for (int u = 0; u < kUnderWay && index < end_; ++u, index += step_) {
          const RowFunctors<F, std::index_sequence<0>> functors(functor, index, 0, index);
          operands.run(
              false, 0, [](int) { return true; },
              [&](const auto& view, int) { return offset(view, index); },
              [&](int, int lane, auto&... values) { use(functors[0], lane, values...); }, views...);
        }
        last();
      }
    }
  }

  template <class View>
  APEX_DEVICE int64_t offset(const View& view, int64_t index) const {
    return index * view.next_row + column_;
  }

  int64_t columns_, column_, begin_, end_;
  int step_;
};

// The same, while column_sums() adds up.
template <class Program, int N>
class ThreadSums : public ThreadRows<typename Program::value_type, N> {
  using T = typename Program::value_type;
  static constexpr int kSums = Program::kSums;

 public:
  Array<T, kSums> sums[N]{};

  APEX_DEVICE ThreadSums(const Program& program, const ThreadRows<T, N>& rows)
      : ThreadRows<T, N>(rows), program_(program) {
    static_assert(ColumnRowOf<ThreadSums, T, kSums>);
    program.column_sums(*this);
  }

  template <int K, class F, class... Views>
  APEX_DEVICE void accumulate(const F& functor, const Views&... views) {
    static_assert(K == kSums, "accumulate<N> must use the program's kSums");
    this->add(program_, sums, functor, views...);
  }

 private:
  const Program& program_;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How matrices, each by itself, are divided among blocks: packs side by side, at most kTilePacks,
// and as many rows of threads as there is room for. A matrix has fewer than 2^31 columns.
struct TileShape {
  int64_t rows, columns;  // of a matrix
  int64_t rows_a_block;
  int tiles, packs;  // side by side; packs of each but the last

  // `least`: rows that a thread has at least.
  TileShape(int64_t rows, int64_t columns, int pack, int64_t least = kTileRows)
      : rows(rows), columns(columns) {
    const int64_t all = columns / pack, of_tile = divide_up(all, divide_up(all, kTilePacks));
    packs = static_cast<int>(of_tile);
    tiles = static_cast<int>(divide_up(all, of_tile));
    const int64_t height = kTileThreads / of_tile, blocks = divide_up(kTileBlocks, tiles);
    rows_a_block = std::clamp(divide_up(rows, blocks), height * least, height * kTileMostRows);
    rows_a_block = std::max(rows_a_block, divide_up(rows, 65535));
  }

  int64_t splits() const { return std::max<int64_t>(1, divide_up(rows, rows_a_block)); }
  dim3 grid(int64_t matrices) const {
    return dim3(static_cast<unsigned>(matrices * tiles), static_cast<unsigned>(splits()));
  }
};

// The rows and columns of one matrix that a block has.
template <class Program, int N>
class ColumnTile {
 protected:
  using T = typename Program::value_type;
  static constexpr int kMost = kTilePacks * N, kSums = Program::kSums;

 public:
  APEX_DEVICE explicit ColumnTile(const TileShape& shape) : shape_(shape) {
    const unsigned tiles = static_cast<unsigned>(shape.tiles), tile = blockIdx.x % tiles;
    matrix_ = blockIdx.x / tiles;
    first_ = static_cast<int>(tile) * shape.packs * N;
    packs_ = min(shape.packs, static_cast<int>(shape.columns - first_) / N);
    height_ = kTileThreads / packs_;
  }

  APEX_DEVICE int64_t matrix() const { return matrix_; }

  // Those of a thread, of the whole batch.
  APEX_DEVICE ThreadRows<T, N> rows() const {
    const int64_t begin = shape_.rows_a_block * blockIdx.y, first = matrix_ * shape_.rows;
    int64_t end = begin + shape_.rows_a_block;
    end = own_row() >= height_ ? begin : end < shape_.rows ? end : shape_.rows;
    const int64_t column = first_ + static_cast<int>(threadIdx.x) % packs_ * N;
    return {shape_.columns, column, first + begin + own_row(), first + end, height_};
  }

  // The program with what its column_sums() needs of this block's columns; by all threads.
  APEX_DEVICE Program with_before(const Program& program) const {
    for (int i = threadIdx.x; i < packs_ * N; i += kTileThreads) {
      put(0, i, program.before(first_ + i));
    }
    __syncthreads();
    return with_vectors(program);
  }

  // Merges what the block's threads have of a column, in pairs; f(column, sums) for each. In
  // double, for roundings of the largest numbers would cost more than those before.
  template <class F>
  APEX_DEVICE void merge(const Program& program, const Array<T, kSums> (&sums)[N],
                         const F& f) const {
    static_assert(kMergesIn<T, Program> == kMergesIn<double, Program>,
                  "merge() must take double, too");
    APEX_SHARED(double, shared, [kSums * N * kTileThreads / 2]);
    const int row = own_row(), thread = threadIdx.x;
    Array<double, kSums> own[N];
#pragma unroll
    for (int lane = 0; lane < N; ++lane) own[lane] = convert_sums<double>(sums[lane]);
    for (int count = height_; count > 1;) {
      const int half = (count + 1) / 2;
      if (row >= half && row < count) {
        for_numbers([&](int i, int lane, int n) {
          shared[i * kTileThreads / 2 + thread - half * packs_] = own[lane][n];
        });
      }
      __syncthreads();
      if (row < count - half) {
        Array<double, kSums> other[N];
        for_numbers([&](int i, int lane, int n) {
          other[lane][n] = shared[i * kTileThreads / 2 + thread];
        });
#pragma unroll
        for (int lane = 0; lane < N; ++lane) merge_sums(program, own[lane], other[lane]);
      }
      __syncthreads();
      count = half;
    }
    if (row == 0) {
      for_numbers([&](int, int lane, int n) {
        shared[n * kMost + thread % packs_ * N + lane] = own[lane][n];
      });
    }
    __syncthreads();
    for (int i = thread; i < packs_ * N; i += kTileThreads) {
      Array<double, kSums> total;
#pragma unroll
      for (int n = 0; n < kSums; ++n) total[n] = shared[n * kMost + i];
      f(first_ + i, total);
    }
  }

 protected:
  APEX_DEVICE int own_row() const { return static_cast<int>(threadIdx.x) / packs_; }

  APEX_DEVICE static T* shared_vectors() {
    struct alignas(16) Vectors {
      T numbers[Program::kVectors * kMost];
    };
    APEX_SHARED(Vectors, vectors);
    return vectors.numbers;
  }
  template <int K>
  APEX_DEVICE static void put(int vector, int column, const Array<T, K>& numbers) {
    T* vectors = shared_vectors();
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[(vector + k) * kMost + column] = numbers[k];
  }
  APEX_DEVICE Program with_vectors(Program program) const {
    program.vectors = {shared_vectors() - first_, kMost};
    return program;
  }

  template <class F>
  APEX_DEVICE static void for_numbers(const F& f) {
#pragma unroll
    for (int i = 0; i < kSums * N; ++i) f(i, i / kSums, i % kSums);
  }

  const TileShape& shape_;
  int64_t matrix_;
  int first_, packs_, height_;  // its first column; packs and rows of threads side by side
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
