// Sums over the cells of every frame, and over those of every label, in one pass on the CPU: rows
// are added to their frame's sums, and while the cache has them once more to their labels'.
#pragma once

#include <algorithm>

namespace apex {
inline namespace APEX_BACKEND_NS {

// Frames whose rows are added to sums of their own for each label. It bounds the error, as
// kRowsPerMerge does, and threads share them without a say in the bits.
inline constexpr int64_t kTileFrames = 16;

// Elements of the rows that are added for their frame before they are for their labels: with two
// operands they fill half of a first-level cache.
inline constexpr int64_t kTileElements = 4096;

template <class P>
concept CellProgram =
    PlainProgram<P> && requires(const P& program, Row<typename P::value_type>& row,
                                const Array<ReadView<typename P::value_type>, P::kSums>& sums) {
      program.column_sums(row, [] { return SumsOfCell{}; });
      program.finish(row, sums);
    };

template <CellProgram Program>
class CellSums {
 public:
  using T = typename Program::value_type;
  static_assert(Program::kSums == 1);

  CellSums(const Cells& cells, int64_t columns, const Program& of_frames, const Program& of_labels)
      : cells_(cells),
        columns_(columns),
        stride_(sums_stride(columns)),
        tiles_((cells.frames + kTileFrames - 1) / kTileFrames),
        of_frames_(of_frames),
        of_labels_(of_labels) {}

  template <class Context>
  void run(const Context& context) const {
    const int64_t size = cells_.width * stride_, tiles = cells_.batch * tiles_;
    const int64_t labels = cells_.batch * cells_.width;
    auto* parts = static_cast<T*>(context.workspace(tiles * size * sizeof(T) + 1));
    context.parallel_for(0, tiles, grain(kTileFrames * size), [&](int64_t begin, int64_t end) {
      Sums sums(*this);
      for (int64_t tile = begin; tile < end; ++tile) add_tile(sums, tile, parts + tile * size);
      finish_streams();
    });
    context.parallel_for(0, labels, grain(tiles_ * stride_), [&](int64_t begin, int64_t end) {
      Sums sums(*this);
      for (int64_t label = begin; label < end; ++label) {
        const int64_t b = label / cells_.width, u = label % cells_.width;
        finish_label(sums, label,
                     u < sample(b).width ? parts + b * tiles_ * size + u * stride_ : nullptr);
      }
      finish_streams();
    });
  }

 private:
  // What a thread works with.
  struct Sums {
    explicit Sums(const CellSums& all)
        : block(zero_sums<T>(all.stride_)),
          totals(zero_sums<double>(all.stride_)),
          row(all.cells_.rows, all.columns_, nullptr) {}

    std::unique_ptr<T[], DeleteSums> block;
    std::unique_ptr<double[], DeleteSums> totals;
    Row<T> row;
  };

  static int64_t grain(int64_t elements) {
    return std::max<int64_t>(1, kRowwiseGrain / std::max<int64_t>(elements, 1));
  }

  // Without cells if they are not all inside the rows.
  Cells::Sample sample(int64_t b) const {
    const Cells::Sample s = cells_.sample(b);
    return s.is_valid ? s : Cells::Sample{};
  }

  void add(Sums& sums, int64_t index, const SumsOfCell& of_cell, T* target) const {
    sums.row.move_to(index);
    sums.row.set_sums(target);
    of_frames_.column_sums(sums.row, [=] { return of_cell; });
  }

  static void order(Sums& sums, T* target) {
    sums.row.set_sums(target);
    sums.row.order_sums(1);
  }

  void merge(Sums& sums, const T* part) const {
    double* totals = sums.totals.get();
    APEX_VECTORIZE
    for (int64_t i = 0; i < stride_; ++i) totals[i] += static_cast<double>(part[i]);
  }

  // Moves the totals to the block.
  void take(Sums& sums) const {
    double* totals = sums.totals.get();
    T* block = sums.block.get();
    APEX_VECTORIZE
    for (int64_t i = 0; i < stride_; ++i) block[i] = static_cast<T>(totals[i]);
    std::fill_n(totals, stride_, 0.0);
  }

  void finish(Sums& sums, const Program& program, int64_t count, int64_t segment) const {
    Row<T> result(count, columns_, nullptr);
    result.move_to(segment);
    program.finish(result, Array<ReadView<T>, 1>{{{sums.block.get()}}});
  }

  // Some frames of a sample; `part` becomes [width, stride], the sums of its labels.
  void add_tile(Sums& sums, int64_t tile, T* part) const {
    const int64_t b = tile / tiles_, first = tile % tiles_ * kTileFrames;
    const int64_t last = std::min(first + kTileFrames, cells_.frames);
    const Cells::Sample s = sample(b);
    if (first < s.frames) std::fill_n(part, s.width * stride_, T(0));
    for (int64_t t = first; t < last; ++t) {
      std::fill_n(sums.block.get(), stride_, T(0));
      if (t < s.frames) add_frame(sums, s, b, t, part);
      finish(sums, of_frames_, cells_.batch * cells_.frames, b * cells_.frames + t);
    }
    for (int64_t u = 0; first < s.frames && u < s.width; ++u) order(sums, part + u * stride_);
  }

  void add_frame(Sums& sums, const Cells::Sample& s, int64_t b, int64_t t, T* part) const {
    constexpr int64_t kMost = kRowsPerMerge<Program, T>;
    const int64_t together =
        std::clamp<int64_t>(kTileElements / std::max<int64_t>(columns_, 1), 1, kMost);
    const int64_t row = s.start + t * s.stride;
    const int64_t frame = b * cells_.frames + t, label = b * cells_.width;
    T* block = sums.block.get();
    int64_t added = 0;
    bool is_merged = false;
    for (int64_t begin = 0; begin < s.width; begin += together) {
      const int64_t end = std::min(begin + together, s.width);
      if (added + end - begin > kMost) {
        order(sums, block);
        merge(sums, block);
        std::fill_n(block, stride_, T(0));
        is_merged = true;
        added = 0;
      }
      for (int64_t u = begin; u < end; ++u) add(sums, row + u, {frame, label + u}, block);
      for (int64_t u = begin; u < end; ++u) {
        add(sums, row + u, {frame, label + u}, part + u * stride_);
      }
      added += end - begin;
    }
    order(sums, block);
    if (!is_merged) return;
    merge(sums, block);
    take(sums);
  }

  // `parts` are those of the label's sample, or null: no cell has this label.
  void finish_label(Sums& sums, int64_t label, const T* parts) const {
    const int64_t frames = parts == nullptr ? 0 : sample(label / cells_.width).frames;
    for (int64_t first = 0; first < frames; first += kTileFrames) {
      merge(sums, parts);
      parts += cells_.width * stride_;
    }
    take(sums);
    finish(sums, of_labels_, cells_.batch * cells_.width, label);
  }

  const Cells& cells_;
  const int64_t columns_, stride_, tiles_;
  const Program &of_frames_, &of_labels_;
};

template <class Context, CellProgram Program>
void cell_sums(const Context& context, const Cells& cells, int64_t columns,
               const Program& of_frames, const Program& of_labels) {
  CellSums<Program>(cells, columns, of_frames, of_labels).run(context);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
