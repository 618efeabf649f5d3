// Sums over the cells of every frame, and over those of every label, on a GPU: two sorts.
#pragma once

namespace apex {
inline namespace APEX_BACKEND_NS {

// Which sum over frames or labels a row of cells is added to.
struct FrameOfRow {
  Cells cells;
  APEX_HD int64_t operator()(int64_t row) const {
    const Cells::Cell cell = cells.cell(row);
    return cell.is_inside ? cell.batch * cells.frames + cell.t : -1;
  }
};

struct LabelOfRow {
  Cells cells;
  APEX_HD int64_t operator()(int64_t row) const {
    const Cells::Cell cell = cells.cell(row);
    return cell.is_inside ? cell.batch * cells.width + cell.u : -1;
  }
};

template <class Context, SegmentProgram Program>
void cell_sums(const Context& context, const Cells& cells, int64_t columns,
               const Program& of_frames, const Program& of_labels) {
  const int64_t frames = cells.batch * cells.frames, labels = cells.batch * cells.width;
  segment_sum(context, group_rows(context, cells.rows, frames, FrameOfRow{cells}), columns,
              of_frames);
  segment_sum(context, group_rows(context, cells.rows, labels, LabelOfRow{cells}), columns,
              of_labels);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
