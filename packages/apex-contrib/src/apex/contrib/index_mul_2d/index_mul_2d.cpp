// Registers index_mul_2d: checks, types and launch; the mathematics is in index_mul_2d.h.
#include "index_mul_2d.h"

#include <tuple>

#include "apex/engine/rowwise.h"
#include "apex/engine/segment_sum.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

// idx1, after the checks that make walking in1, in2 and it safe. On a GPU idx1's numbers are the
// kernels' affair: an error would wait for the device.
Picks picks_of(const char* op, const Tensor& in1, const Tensor& in2, const Tensor& idx1) {
  check_tensors(op, {{"in1", in1}, {"in2", in2}});
  check(in1.dim() == 2 && in1.is_contiguous(), op, ": in1 must be contiguous [M, H], got ",
        describe(in1), ".");
  check(in2.dim() == 2 && in2.size(1) == in1.size(1), op, ": in2 must be [N, ", in1.size(1),
        "], rows as long as those of in1, got ", describe(in2), ".");
  Picks picks{nullptr, in2.size(0), in1.size(0), rows_ahead(in1.size(1))};
  check_sizes(op, {"in2", in2}, in2.sizes(), in1.scalar_type(), {"in1", in1});
  check_like(op, {"idx1", idx1}, picks.rows, ScalarType::Long, {"in1", in1});
  check(picks.in1_rows > 0 || picks.rows == 0, op, ": in1 has no rows to pick: ", describe(in1),
        ".");
  picks.idx1 = data<int64_t>(idx1, "idx1");
#if defined(APEX_CPU)
  bool all = true;  // asked by vectors first
  for (int64_t row = 0; row < picks.rows; ++row) all &= picks(row) >= 0;
  for (int64_t row = 0; row < (all ? 0 : picks.rows); ++row) {
    if (picks(row) >= 0) continue;
    fail(op, ": idx1[", row, "] is ", picks.idx1[row], ", but in1 has ", picks.in1_rows,
         " rows: expected ", -picks.in1_rows, " to ", picks.in1_rows - 1, ".");
  }
#endif
  return picks;
}

Tensor index_mul_2d_forward(const Tensor& in1, const Tensor& in2, const Tensor& idx1) {
  const char* op = "index_mul_2d_forward";
  Picks picks = picks_of(op, in1, in2, idx1);
  Tensor y = empty_like(in2, in2.scalar_type());
  Context context(in1);
  dispatch_floating(op, in1.scalar_type(), [&]<class S>() {
    rowwise(context, picks.rows, in1.size(1),
            IndexMulForward<S>{picks, data<S>(in1, "in1"), data<S>(in2, "in2"), data<S>(y, "y")});
  });
  return y;
}

std::tuple<Tensor, Tensor> index_mul_2d_backward(const Tensor& dy_of_any_layout, const Tensor& in1,
                                                 const Tensor& in2, const Tensor& idx1,
                                                 bool in1_grad) {
  const char* op = "index_mul_2d_backward";
  Picks picks = picks_of(op, in1, in2, idx1);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);  // often one number, expanded
  check_sizes(op, {"dy", dy}, in2.sizes(), in1.scalar_type(), {"in2", in2});
  Tensor din1 = in1_grad ? empty_like(in1, in1.scalar_type()) : empty(in1, {0}, in1.scalar_type());
  Tensor din2 = empty_like(in2, in2.scalar_type());
  Context context(in1);
  dispatch_floating(op, in1.scalar_type(), [&]<class S>() {
    rowwise_segment_sum(
        context, picks.rows, in1.size(1), picks.in1_rows, picks, in1_grad,
        IndexMulBackward<S>{picks, data<S>(dy, "dy"), data<S>(in1, "in1"), data<S>(in2, "in2"),
                            data<S>(din1, "din1"), data<S>(din2, "din2")});
  });
  return {din1, din2};
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("index_mul_2d_forward", TORCH_BOX(&index_mul_2d_forward));
  m.impl("index_mul_2d_backward", TORCH_BOX(&index_mul_2d_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
