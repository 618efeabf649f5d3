// Sums over the cells of every frame, and over those of every label, on a GPU: which rows they are
// is known, so that nothing is sorted. Both are segments of the same launches.
#pragma once

namespace apex {
inline namespace APEX_BACKEND_NS {

// Rows of a frame or label that a thread adds up, and after which a run of additions ends, which
// bounds the error. Both begin anew in each of them: the samples beside one have no say in its
// bits.
inline constexpr int64_t kCellPart = 128, kCellRun = 16;

// Segments are the frames [batch, frames], then the labels [batch, width].
struct CellSegments {
  static constexpr bool has_offsets = true;

  int64_t rows, count, heads;
  int64_t of_frames, frame_heads, label_heads;  // segments of frames, and heads of each segment
  Cells cells;

  explicit CellSegments(const Cells& cells) : rows(cells.rows), cells(cells) {
    of_frames = cells.batch * cells.frames;
    count = of_frames + cells.batch * cells.width;
    frame_heads = cells.width > 0 ? (cells.width - 1) / kCellPart : 0;
    label_heads = cells.frames > 0 ? (cells.frames - 1) / kCellPart : 0;
    heads = of_frames * frame_heads + (count - of_frames) * label_heads;
  }

  struct Part : SegmentPart {
    static constexpr int64_t kRun = kCellRun;
    int64_t row, step;
    template <int N>
    APEX_DEVICE void rows(int64_t place, int64_t (&into)[N]) const {
      for (int i = 0; i < N; ++i) into[i] = row + (place + i) * step;
    }
  };

  // The rows from `begin` on of a segment, whose first head is `head`.
  APEX_DEVICE Part part(int64_t segment, int64_t begin, int64_t head) const {
    const bool is_frame = segment < of_frames;
    int64_t own;  // frame or label of the sample
    const int64_t b = is_frame ? divide(segment, cells.frames, own)
                               : divide(segment - of_frames, cells.width, own);
    const Cells::Sample s = cells.sample(b);
    const bool has_cells = s.is_valid && own < (is_frame ? s.frames : s.width);
    const int64_t length = !has_cells ? 0 : is_frame ? s.width : s.frames;
    const int64_t parts = (length + kCellPart - 1) / kCellPart;
    return {{segment, min(begin, length), min(begin + kCellPart, length), head,
             head + (parts > 1 ? parts - 1 : 0), b * (is_frame ? cells.width : cells.frames)},
            s.start + own * (is_frame ? s.stride : 1),
            is_frame ? 1 : s.stride};
  }

  APEX_DEVICE Part head(int64_t i) const {
    const int64_t of_all_frames = of_frames * frame_heads;
    int64_t before;  // of the segment
    const int64_t segment = i < of_all_frames
                                ? divide(i, frame_heads, before)
                                : of_frames + divide(i - of_all_frames, label_heads, before);
    return part(segment, (before + 1) * kCellPart, 0);
  }

  APEX_DEVICE Part first(int64_t segment) const {
    const int64_t labels = segment - of_frames;
    return part(
        segment, 0,
        labels < 0 ? segment * frame_heads : of_frames * frame_heads + labels * label_heads);
  }

  APEX_DEVICE void find_offsets() const {}
};

// The programs of frames and labels as one of segments.
template <class Program>
struct ProgramOfCells {
  using value_type = typename Program::value_type;
  using storage_type = typename Program::storage_type;
  static constexpr int kSums = Program::kSums;

  int64_t of_frames;
  Program of_frame, of_label;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    of_frame.column_sums(row, [this, &row] {
      const int64_t label = row.segment() - of_frames, other = row.other() + row.place();
      return label < 0 ? SumsOfCell{row.segment(), other} : SumsOfCell{other, label};
    });
  }

  template <class R, class Sums>
  APEX_HD void finish(R& row, const Sums& sums) const {
    if (row.index() < of_frames) return of_frame.finish(row, sums);
    row.move_to(row.index() - of_frames, 0);
    of_label.finish(row, sums);
  }
};

template <class Context, class Program>
void cell_sums(const Context& context, const Cells& cells, int64_t columns,
               const Program& of_frames, const Program& of_labels) {
  const CellSegments segments(cells);
  run_segment_sum<false>(context, segments, columns,
                         ProgramOfCells<Program>{segments.of_frames, of_frames, of_labels});
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
