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

// A program of cells as one of segments.
template <class Program>
struct ProgramOfCells {
  using value_type = typename Program::value_type;
  using storage_type = typename Program::storage_type;
  static constexpr int kSums = Program::kSums;

  Cells cells;
  Program program;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    program.column_sums(row, [this, &row] {
      const Cells::Cell cell = cells.cell(row.index());
      return SumsOfCell{cell.batch * cells.frames + cell.t, cell.batch * cells.width + cell.u};
    });
  }

  template <class R, class Sums>
  APEX_HD void finish(R& row, const Sums& sums) const {
    program.finish(row, sums);
  }
};

template <class Context, class Program>
void cell_sums(const Context& context, const Cells& cells, int64_t columns,
               const Program& of_frames, const Program& of_labels) {
  const int64_t frames = cells.batch * cells.frames, labels = cells.batch * cells.width;
  segment_sum(context, group_rows(context, cells.rows, frames, FrameOfRow{cells}), columns,
              ProgramOfCells<Program>{cells, of_frames});
  segment_sum(context, group_rows(context, cells.rows, labels, LabelOfRow{cells}), columns,
              ProgramOfCells<Program>{cells, of_labels});
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
