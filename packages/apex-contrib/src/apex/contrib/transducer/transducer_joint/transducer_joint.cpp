// Registers transducer_joint: checks, types and launches; the mathematics is in transducer_joint.h.
#include "transducer_joint.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "apex/engine/cell_sums.h"
#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Of h, and of what goes with it.
std::vector<int64_t> sizes_of(const Cells& cells, const Tensor& f) {
  if (cells.is_packed) return {cells.rows, f.size(2)};
  return {cells.batch, cells.frames, cells.width, f.size(2)};
}

const uint8_t* mask_of(const char* op, const OptionalTensor& keep, const Cells& cells,
                       const Tensor& f) {
  if (!keep) return nullptr;
  check_sizes(op, {"keep", keep}, sizes_of(cells, f), ScalarType::Bool, {"f", f});
  return mask_data(*keep, "keep");
}

Cells cells_of(const char* op, const Tensor& f, const Tensor& g, const Tensor& f_len,
               const Tensor& g_len, const OptionalTensor& ends, int64_t packed_rows) {
  check_tensors(op, {{"f", f}, {"g", g}});
  check(f.dim() == 3 && f.is_contiguous(), op, ": f must be contiguous [B, T, H], got ",
        describe(f), ".");
  check(g.dim() == 3 && g.size(0) == f.size(0) && g.size(2) == f.size(2), op, ": g must be [",
        f.size(0), ", U, ", f.size(2), "], got ", describe(g), ".");
  check(packed_rows >= 0, op, ": packed_batch must not be negative, got ", packed_rows, ".");
  Cells cells{};
  cells.batch = f.size(0);
  cells.frames = f.size(1);
  cells.width = g.size(1);
  const int64_t all = product({cells.batch, cells.frames, cells.width});
  cells.is_packed = ends.has_value();
  cells.rows = ends ? packed_rows : all;
  const bool is_countable = all < kTooMany && product({all, f.size(2)}) < kTooMany &&
                            product({cells.rows, f.size(2)}) < kTooMany;
  check(is_countable, op, ": the result would have more than 2^63 elements, for f ", describe(f),
        ", g ", describe(g), " and packed_batch ", packed_rows, ".");
  check_sizes(op, {"g", g}, g.sizes(), f.scalar_type(), {"f", f});
  check_like(op, {"f_len", f_len}, cells.batch, ScalarType::Long, {"f", f});
  check_like(op, {"g_len", g_len}, cells.batch, ScalarType::Long, {"f", f});
  cells.f_len = data<int64_t>(f_len, "f_len");
  cells.u_len = data<int64_t>(g_len, "g_len");
  if (ends) {
    check_like(op, {"batch_offset", ends}, cells.batch, ScalarType::Long, {"f", f});
    cells.ends = data<int64_t>(*ends, "batch_offset");
  }
#if defined(APEX_CPU)  // a GPU would have to be waited for
  for (int64_t b = 0; b < cells.batch; ++b) {
    const int64_t frames = cells.f_len[b], columns = cells.u_len[b];
    check(frames >= 0 && frames <= cells.frames, op, ": f_len[", b, "] is ", frames,
          ": expected 0 to ", cells.frames, ", the frames of f.");
    check(columns >= 0 && columns <= cells.width, op, ": g_len[", b, "] is ", columns,
          ": expected 0 to ", cells.width, ", the rows of g.");
    if (!ends) continue;
    const int64_t expected = (b == 0 ? 0 : cells.ends[b - 1]) + frames * columns;
    check(cells.ends[b] == expected && expected <= cells.rows, op, ": batch_offset[", b, "] is ",
          cells.ends[b], ": expected ", expected,
          ", the sum of f_len * g_len up to this sample, and at most packed_batch, ", cells.rows,
          ".");
  }
#endif
  return cells;
}

Tensor forward(const Tensor& f, const Tensor& g, const Tensor& f_len, const Tensor& g_len,
               const OptionalTensor& keep, const OptionalTensor& ends, int64_t packed_rows,
               bool relu, double scale) {
  const char* op = "transducer_joint_forward";
  Cells cells = cells_of(op, f, g, f_len, g_len, ends, packed_rows);
  const int64_t columns = f.size(2);
  const uint8_t* mask = mask_of(op, keep, cells, f);
  Tensor h = empty(f, sizes_of(cells, f), f.scalar_type());
  // On a CPU a thread takes all labels of a frame, which are short rows; a GPU needs the rows.
#if defined(APEX_CPU)
  const int64_t cells_in_row = std::max<int64_t>(cells.width, 1);
#else
  const int64_t cells_in_row = 1;
#endif
  Context context(f);
  dispatch_floating(op, f.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    TransducerJointForward<S> program{cells,
                                      columns,
                                      data<S>(f, "f"),
                                      data<S>(g, "g"),
                                      mask,
                                      data<S>(h, "h"),
                                      relu ? T(0) : -std::numeric_limits<T>::infinity(),
                                      static_cast<T>(scale),
                                      cells_in_row};
    const int64_t rows = (cells.rows + cells_in_row - 1) / cells_in_row;
    rowwise(context, rows, cells_in_row * columns, program);
  });
  return h;
}

std::tuple<Tensor, Tensor> backward(const Tensor& dh_of_any_layout, const Tensor& f,
                                    const Tensor& g, const Tensor& f_len, const Tensor& g_len,
                                    const OptionalTensor& keep, const OptionalTensor& ends,
                                    int64_t packed_rows, bool relu, double scale) {
  const char* op = "transducer_joint_backward";
  Cells cells = cells_of(op, f, g, f_len, g_len, ends, packed_rows);
  const int64_t columns = f.size(2);
  check_tensors(op, {{"dh", dh_of_any_layout}});
  Tensor dh = as_contiguous(dh_of_any_layout);  // often one number, expanded
  check_sizes(op, {"dh", dh}, sizes_of(cells, f), f.scalar_type(), {"f", f});
  const uint8_t* mask = mask_of(op, keep, cells, f);
  Tensor df = empty_like(f, f.scalar_type()), dg = empty_like(g, g.scalar_type());
  Context context(f);
  dispatch_floating(op, f.scalar_type(), [&]<class S>() {
    dispatch_bool(relu, [&]<bool kRelu>() {
      dispatch_bool(mask != nullptr, [&]<bool kKeep>() {
        TransducerJointBackward<S, kRelu, kKeep> program{
            columns,
            data<S>(dh, "dh"),
            data<S>(f, "f"),
            data<S>(g, "g"),
            mask,
            data<S>(df, "df"),
            static_cast<compute_t<S>>(kKeep ? scale : 1)};
        auto of_labels = program;
        of_labels.gradient = data<S>(dg, "dg");
        cell_sums(context, cells, columns, program, of_labels);
      });
    });
  });
  return {df, dg};
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("transducer_joint_forward", TORCH_BOX(&forward));
  m.impl("transducer_joint_backward", TORCH_BOX(&backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
