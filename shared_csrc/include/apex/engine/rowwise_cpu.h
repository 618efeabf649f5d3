// Row programs on the CPU: a row at a time per thread, packs of kPack lanes.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "apex/engine/fold_cpu.h"
#include "apex/engine/lanes_cpu.h"
#include "apex/engine/row_concepts.h"
#include "apex/engine/runs_cpu.h"
#include "apex/engine/sums_cpu.h"
#include "apex/engine/tails_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Elements per thread below which a second thread costs more than it brings.
inline constexpr int64_t kRowwiseGrain = 16384;
// Packs added into one set of lanes before these go to a second one, and packs in the second before
// its sum goes to a double: both bound the error. A run begins with zeros again, so that the terms
// after a large one are rounded to its last digit for the rest of a run only.
inline constexpr int kPacksPerRun = 8, kPacksPerFlush = 64;

// Column sums of a thread lie in rows of whole packs: the last groups of lanes write behind the
// last column.
APEX_HD int64_t sums_stride(int64_t columns) { return (columns + kPack - 1) / kPack * kPack; }

template <class T, int kCount>
class SeveralRows;

// Whether the program's rows keep terms for with_terms().
template <class Program>
inline constexpr bool kHasTerms = requires { requires Program::kKeepsTerms; };

template <class T, bool kTerms = false>
class Row {
  template <class, int>
  friend class SeveralRows;

 public:
  static constexpr int kRows = 1;

  Row(int64_t rows, int64_t columns, T* sums)
      : rows_(rows), width_(columns), columns_(columns), sums_(sums) {}

  void move_to(int64_t index) { index_ = index; }
  int64_t index() const { return index_; }
  int64_t columns() const { return columns_; }
  // Where column sums are added from now on.
  void set_sums(T* sums) { sums_ = sums; }
  // Where with_terms() keeps them.
  void set_terms(T* terms) { terms_ = terms; }

  // The same row, of which only columns [begin, end) are seen: it begins at the first of them. It
  // has no column sums.
  Row within(int64_t begin, int64_t end) const { return Row(*this, begin_ + begin, end - begin); }

  // This row of a matrix [rows, columns], for reading or writing.
  template <class S>
  ReadView<S> in(const S* matrix) const {
    return in(matrix, width_);
  }
  // The same of a matrix whose rows begin `stride` elements apart; out() takes a stride, too.
  template <class S>
  ReadView<S> in(const S* matrix, int64_t stride) const {
    return {matrix + index_ * stride + begin_, stride};
  }
  template <class S>
  WriteView<S> out(S* matrix, int64_t stride) const {
    return result(matrix, stride, Streaming{});
  }
  template <class S>
  WriteView<S> out(S* matrix) const {
    return out(matrix, width_);
  }
  // A row at any address, for reading or writing; the one that is read next is `next` elements
  // away.
  template <class S>
  ReadView<S> from(const S* address, int64_t next = 0) const {
    // Of rows shorter than a pack nothing else does.
    if (next != 0) __builtin_prefetch(address + next, 0, 2);
    return {address + begin_, next};
  }
  template <class S>
  WriteView<S> to(S* address, int64_t next = 0) const {
    constexpr int64_t kBytes = sizeof(S), kLine = 64;
    S* row = address + begin_;
    if (next == 0 || next * kBytes % kLine != 0) return {row, next};
    // Runs of each_of() make a row of the result. Whether it has pages says the first of a thread.
    const int64_t run = width_ * kBytes;
    const bool is_large = can_stream(row, run, rows_ * run, kStreamingOfRows);
    return {row, next, is_large && is_backed(row, 1)};
  }
  // A vector [columns] that all rows share.
  template <class S>
  SharedView<S> shared(const S* vector) const {
    return {{vector + begin_}};
  }

  // Numbers that depend on the row's index and the column alone, one for each column of the whole
  // row: see views.h.
  template <class Numbers>
  GeneratedView<Numbers> generated(const Numbers& numbers) const {
    return generated_view(numbers, index_, width_);
  }

  // A view of 16-bit elements that a long functor reads or writes.
  template <class View>
  AheadView<View> ahead(const View& view) const {
    return {view};
  }

  // This row of a matrix, for several passes. A GPU keeps it converted; here the cache has it, and
  // converting it again costs less than a converted copy that crowds the cache.
  template <class S>
  auto stage(const S* matrix) const {
    return in(matrix);
  }

  // each(functor, row.out(matrix), views...), and what it wrote, rounded, for several passes. The
  // stores go through the cache, in which the row is read next.
  template <class S, class F, class... Views>
  auto stage_result(S* matrix, const F& functor, const Views&... views) const {
    each(functor, WriteView<S>{matrix + index_ * width_ + begin_, width_}, views...);
    return in(static_cast<const S*>(matrix));
  }

  // Sum over the row of functor(values...), which returns T. It may write, as that of `each`.
  template <class F, class... Views>
  T sum(const F& functor, const Views&... views) const {
    auto wrapped = [&](auto&... values) { return Array<T, 1>{{functor(values...)}}; };
    return sums<1>(wrapped, views...)[0];
  }

  // N sums in one pass; the functor returns Array<T, N>.
  template <int N, class F, class... Views>
  Array<T, N> sums(const F& functor, const Views&... views) const {
    return pass<0>(std::make_index_sequence<N>{}, functor, nullptr, views...);
  }

  // use(sum of term(values...), each_term), where each_term(functor, others...) is an each() whose
  // functor gets numbers of one view or three, and behind them the term. Terms are kept, and the
  // program must say kKeepsTerms = true for that: an exp takes longer than a store.
  template <class F, class Use, class... Views>
  void with_terms(const F& term, const Use& use, const Views&... views) const {
    static_assert(kTerms,
                  "with_terms() needs `static constexpr bool kKeepsTerms = true;` in the "
                  "program: without it there is no memory for the terms");
    T* kept = terms_;
    const T total =
        sum([&](T& of_column, const auto&... values) { return of_column = term(values...); },
            WriteView<T>{kept}, views...);
    use(total, [&](const auto& functor, const auto&... others) {
      each(functor, others..., SharedView<T>{{kept}});
    });
  }

  // sums<N>(), and in the same pass accumulate<M>() with `columns`, where column sums are wanted.
  template <int N, int M, class F, class C, class... Views>
  Array<T, N> sums_and_columns(const F& functor, const C& columns, const Views&... views) {
    if (sums_ == nullptr) return sums<N>(functor, views...);
    lay_sums_of<Lanes<T, Views...>, Views...>();
    return pass<M>(std::make_index_sequence<N>{}, functor, columns, views...);
  }

  // The mean of the row's first columns, or 0 without columns: a number near the row's mean.
  template <class S>
  T pivot(const ReadView<S>& view) const {
    constexpr int kFirst = 16;
    if (columns_ < kFirst) return columns_ == 0 ? T(0) : convert<T>(view.data[0]);
    T values[kFirst];
    load_pack(view.data, values);
    Vector<T, kFirst / 2> halves[2];  // no wider than what the conversion stores
    memcpy(halves, values, sizeof(halves));
    return tree_sum<T, kFirst / 2>(halves[0] + halves[1]) / T(kFirst);
  }

  // Largest functor(values...) of the row, of those that are not NaN; -inf without any.
  template <class F, class... Views>
  T max(const F& functor, const Views&... views) const {
    T largest = kLowest;
    int64_t column = 0;
    if (columns_ >= kPack) {
      alignas(64) T lanes[kPack];
      std::fill(lanes, lanes + kPack, kLowest);
      Lanes<T, Views...> pack(views...);
      for (; column + kPack <= columns_; column += kPack) {
        pack.at(column);
        pack.each([&](int slot, auto&... values) {
          lanes[slot] = larger(functor(values...), lanes[slot]);
        });
      }
      largest = max_of<kPack>(lanes);
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      return max_of_end(largest, column, count, functor, views...);
    }
    return largest;
  }

  // functor(T& value, ...) for every column; values of written views are stored.
  template <class F, class... Views>
  void each(const F& functor, const Views&... views) const {
    int64_t column = 0;
    if (columns_ >= kPack) {
      const F own = functor;  // which no store can change, for all the compiler knows
      Lanes<T, Views...> pack(views...);
      for (; column + kPack <= columns_; column += kPack) {
        pack.at(column);
        pack.each([&](int, auto&... values) { own(values...); });
        pack.done();
      }
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      each_of_end(column, count, functor, views...);
    }
  }

  // each() for `count` runs of these columns: from one to the next, a view goes on by the `next` of
  // from() and to(), and what shared() gave stays.
  template <class F, class... Views>
  void each_of(int64_t count, const F& functor, Views... views) const {
    if (kWholePacksByGroups || columns_ < kPack) {
      return each_of_runs<T>(columns_, count, functor, views...);
    }
    for (int64_t run = 0; run < count; ++run) {
      each(functor, views...);
      ((views.data += views.next_row), ...);
    }
  }

  // A reduction of one's own: functor(Array<T, N>& state, values...) adds a column to a state,
  // which began as `empty`; merge(a, b) returns the state of both a's columns and b's.
  template <int N, class F, class Merge, class... Views>
  Array<T, N> fold(const Array<T, N>& empty, const F& functor, const Merge& merge,
                   const Views&... views) const {
    return fold_columns(columns_, empty, functor, merge, views...);
  }

  // functor(T& value, ...) for one column, after an `each` over the same views.
  template <class F, class... Views>
  void at(int64_t column, const F& functor, const Views&... views) const {
    each_of_tail<T>(
        column, 1, [&](const TailLane&, auto&... values) { functor(values...); }, views...);
  }

  // Once per row, for scalars such as a row's mean.
  template <class F>
  void once(const F& f) const {
    f();
  }

  // functor(Array<T, N>& sums, values...) for every column, with that column's running sums. It may
  // write, as that of `each`.
  template <int N, class F, class... Views>
  void accumulate(const F& functor, const Views&... views) {
    Lanes<T, Views...> pack(views...);
    lay_sums_of<Lanes<T, Views...>, Views...>();
    int64_t column = 0;
    for (; column + kPack <= columns_; column += kPack) {
      pack.at(column);
      T* sums = sums_ + column;
      pack.each([&](int slot, auto&... values) { add_to<N>(sums + slot, functor, values...); });
      pack.done();
    }
    if (int count = static_cast<int>(columns_ - column); count > 0) {
      accumulate_end<N>(column, count, functor, views...);
    }
  }

  // of_row(index) makes the functor of a row.
  template <int N, class F, class... Views>
    requires kMadeForRow<F>
  void accumulate(const F& of_row, const Views&... views) {
    accumulate<N>(of_row(index_), views...);
  }

  // Puts the running sums of `count` numbers per column, which lie by slot, in order of columns.
  void order_sums(int count) {
    if (!paired_) return;
    for (int n = 0; n < count; ++n) {
      T* sums = sums_ + n * sums_stride(width_);
      int64_t column = 0;
      for (; column + kPack <= columns_; column += kPack) order_pairs<kPack>(sums + column);
      if (!paired_end_) continue;
      for (; column < columns_; column += 2 * kGroup) order_pairs<2 * kGroup>(sums + column);
    }
  }

 private:
  // A window. Member by member, so that it needs no memory: the copy of a whole row waited for the
  // stores to it.
  Row(const Row& row, int64_t begin, int64_t columns)
      : index_(row.index_),
        rows_(row.rows_),
        width_(row.width_),
        begin_(begin),
        columns_(columns),
        sums_(nullptr),
        terms_(row.terms_),
        backing_(row.backing_) {}

  static constexpr T kLowest = -std::numeric_limits<T>::infinity();

  template <int N>
  static void max_into(T* lanes, const T* others) {
    APEX_VECTORIZE_FEW
    for (int lane = 0; lane < N; ++lane) {
      lanes[lane] = larger(others[lane], lanes[lane]);
    }
  }

  // The largest of N lanes. Widths are constants, so that the narrow ones are vector operations.
  template <int N>
  static T max_of(T* lanes) {
    if constexpr (N > 1) {
      max_into<N / 2>(lanes, lanes + N / 2);
      return max_of<N / 2>(lanes);
    }
    return lanes[0];
  }

  // The ends of rows, less than a pack, are functions of their own: beside them, the loops over
  // packs have fewer registers, and took up to twice the time.
  template <class F, class... Views>
  [[gnu::noinline]] static void each_of_end(int64_t column, int count, const F& functor,
                                            const Views... views) {
    const F own = functor;
    each_of_tail<T>(
        column, count, [&](const TailLane&, auto&... values) { own(values...); }, views...);
  }

  template <class F, class... Views>
  [[gnu::noinline]] static T max_of_end(T largest, int64_t column, int count, const F& functor,
                                        const Views... views) {
    alignas(64) T lanes[kGroup];
    std::fill(lanes, lanes + kGroup, largest);
    auto body = [&](const TailLane& lane, auto&... values) {
      T term = functor(values...);
      lanes[lane.of_group] = larger(lane.is_present ? term : kLowest, lanes[lane.of_group]);
    };
    each_of_tail<T>(column, count, body, views...);
    return max_of<kGroup>(lanes);
  }

  template <int N, class F, class... Views>
  [[gnu::noinline]] void accumulate_end(int64_t column, int count, const F& functor,
                                        const Views... views) const {
    T* sums = sums_ + column;
    auto body = [&](const TailLane& lane, auto&... values) {
      add_to<N>(sums + lane.slot, functor, values...);
    };
    each_of_tail<T>(column, count, body, views...);
  }

  // Terms are added group by group: through an array of a pack, they would take twice the
  // instructions.
  template <int M, size_t... I, class F, class C, class... Views>
  [[gnu::noinline]] static Array<double, sizeof...(I)> pass_end(std::index_sequence<I...>,
                                                                const Row* row, int64_t column,
                                                                int count, const F& functor,
                                                                const C& columns,
                                                                const Views... views) {
    LaneSums<T, kGroup> lanes[sizeof...(I)];
    alignas(64) T terms[sizeof...(I)][kGroup];
    auto body = [&, row](const TailLane& lane, auto&... values) {
      auto term = terms_of<M>(row, functor, columns, column + lane.slot, values...);
      ((terms[I][lane.of_group] = lane.is_present ? term[I] : T(0)), ...);
    };
    each_group_of_tail<T>(column, count, body, [&] { (lanes[I].add(terms[I]), ...); }, views...);
    (lanes[I].end_run(), ...);
    return {{static_cast<double>(lanes[I].take())...}};
  }

  // How column sums lie, by slot or in order, that these lanes and the ends of their views are
  // added to.
  template <class Pack, class... Views>
  void lay_sums_of() {
    paired_ = Pack::kPaired;
    paired_end_ = is_tail_paired<T, Views...>(columns_ % kPack);
  }

  template <class S>
  WriteView<S> result(S* matrix, int64_t stride, Streaming least) const {
    constexpr int64_t kBytes = sizeof(S);
    S* row = matrix + index_ * stride + begin_;
    int64_t bytes = ((rows_ - 1) * stride + columns_) * kBytes;
    bool streamed = can_stream(row, columns_ * kBytes, bytes, least) && is_backed(matrix, bytes);
    return {row, stride, streamed};
  }

  // Whether a result has pages: its last, which is written last. Asked once, and of one result:
  // several come from the same place.
  bool is_backed(const void* matrix, int64_t bytes) const {
    if (!backing_->is_asked) {
      backing_->is_backed = has_pages(static_cast<const char*>(matrix) + bytes - 1);
    }
    backing_->is_asked = true;
    return backing_->is_backed;
  }

  // functor(sums, values...) of one column, whose first sum is at `first`.
  template <int N, class F, class... Values>
  APEX_HD void add_to(T* first, const F& functor, Values&... values) const {
    const int64_t stride = sums_stride(width_);
    Array<T, N> sums;
    for (int n = 0; n < N; ++n) sums[n] = first[n * stride];
    functor(sums, values...);
    for (int n = 0; n < N; ++n) first[n * stride] = sums[n];
  }

  // functor(values...), and with M > 0 columns(sums, values...) of the same column of a row.
  template <int M, class F, class C, class... Values>
  APEX_HD static auto terms_of(const Row* row, const F& functor, const C& columns, int64_t column,
                               Values&... values) {
    if constexpr (M > 0) row->template add_to<M>(row->sums_ + column, columns, values...);
    return functor(values...);
  }

  template <int M, size_t... I, class F, class C, class... Views>
  Array<T, sizeof...(I)> pass(std::index_sequence<I...>, const F& functor, const C& columns,
                              const Views&... views) const {
    const Row* row = M > 0 ? this : nullptr;  // a row without a pointer to it needs no memory
    LaneSums<T> lanes[sizeof...(I)];
    double totals[sizeof...(I)] = {};
    Lanes<T, Views...> pack(views...);
    int64_t packed = columns_ - columns_ % kPack;
    for (int64_t column = 0; column < packed;) {
      int64_t flush = std::min(packed, column + kPack * kPacksPerFlush);
      while (column < flush) {
        int64_t end = std::min(flush, column + kPack * kPacksPerRun);
        for (; column < end; column += kPack) {
          alignas(64) T terms[sizeof...(I)][kPack];
          pack.at(column);
          pack.each([&, row](int slot, auto&... values) {
            auto term = terms_of<M>(row, functor, columns, column + slot, values...);
            ((terms[I][slot] = term[I]), ...);
          });
          pack.done();
          (lanes[I].add(terms[I]), ...);
        }
        (lanes[I].end_run(), ...);
      }
      ((totals[I] += lanes[I].take()), ...);
    }
    if (int count = static_cast<int>(columns_ - packed); count > 0) {
      Array<double, sizeof...(I)> end =
          pass_end<M>(std::index_sequence<I...>{}, row, packed, count, functor, columns, views...);
      ((totals[I] += end[I]), ...);
    }
    return {{static_cast<T>(totals[I])...}};
  }

  struct Backing {
    bool is_asked = false, is_backed = false;
  };

  int64_t index_ = 0, rows_;
  int64_t width_, begin_ = 0, columns_;  // of the operands, and of the window that is seen
  T* sums_;                              // [kSums, sums_stride(columns)] of this thread, or null
  T* terms_ = nullptr;                   // [columns] of this thread, or null
  bool paired_ = false, paired_end_ = false;  // sums of whole packs lie by slot, and behind them
  Backing own_backing_;
  Backing* backing_ = &own_backing_;  // windows keep that of the row that they are part of
};

template <class P>
concept RowProgram = RowProgramOn<P, Row<typename P::value_type>>;

}  // namespace APEX_BACKEND_NS
}  // namespace apex
