// Registers transducer_loss: checks, types and launches; the mathematics is in transducer_loss.h.
#include "transducer_loss.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "apex/engine/rowwise.h"
#include "apex/engine/samplewise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

#if defined(APEX_CPU)
void check_numbers(const char* op, const Lattice& lattice) {
  for (int64_t b = 0; b < lattice.batch; ++b) {
    const int64_t f = lattice.f_len[b], y = lattice.u_len[b];
    check(f >= 0 && f <= lattice.frames, op, ": f_len[", b, "] is ", f, ": expected 0 to ",
          lattice.frames, ", the frames of x (packed: max_f_len, and at most the rows of x).");
    check(y >= 0 && y < lattice.width, op, ": y_len[", b, "] is ", y, ": expected 0 to ",
          lattice.width - 1, ", the labels of a sample.");
    if (lattice.is_packed) {
      const int64_t start = b == 0 ? 0 : lattice.ends[b - 1];
      check(lattice.sample(b).is_valid && lattice.ends[b] - f * (y + 1) == start, op,
            ": batch_offset[", b, "] is ", lattice.ends[b], ": expected ", start + f * (y + 1),
            ", the sum of f_len * (y_len + 1) up to this sample, and at most ", lattice.rows,
            ", the rows of x.");
    }
    for (int64_t u = 0; u < y; ++u) {
      const int64_t label = lattice.labels[b * (lattice.width - 1) + u];
      check(lattice.is_class(label), op, ": label[", b, ", ", u, "] is ", label, ", but x has ",
            lattice.classes, " classes: expected 0 to ", lattice.classes - 1, ".");
    }
  }
}
#else
void check_numbers(const char*, const Lattice&) {}  // would wait for the GPU
#endif

Lattice lattice_of(const char* op, const Tensor& x, const Tensor& label, const Tensor& f_len,
                   const Tensor& y_len, const OptionalTensor& ends, int64_t blank,
                   int64_t max_f_len, bool softmax) {
  check_tensors(op, {{"x", x}, {"label", label}});
  check(x.dim() == (ends ? 2 : 4) && x.is_contiguous(), op, ": x must be contiguous, ",
        ends ? "[rows, V]" : "[B, T, U, V]", ", got ", describe(x), ".");
  check(label.dim() == 2, op, ": label must be [B, U - 1], got ", describe(label), ".");
  Lattice lattice{};
  lattice.more = 1;
  lattice.is_packed = ends.has_value();
  lattice.batch = label.size(0);
  lattice.width = label.size(1) + 1;
  // A sample of more frames than there are rows does not fit, whatever max_f_len is.
  lattice.frames = ends ? std::min(max_f_len, x.size(0)) : x.size(1);
  lattice.rows = ends ? x.size(0) : product({lattice.batch, lattice.frames, lattice.width});
  lattice.classes = x.size(x.dim() - 1);
  lattice.blank = blank;
  lattice.softmax = softmax;
  check(ends || (x.size(0) == lattice.batch && x.size(2) == lattice.width), op, ": x must be [",
        lattice.batch, ", T, ", lattice.width, ", V] for label ", describe(label), ", got ",
        describe(x), ".");
  check(blank >= 0 && blank < lattice.classes, op, ": blank must be a class of x, 0 to ",
        lattice.classes - 1, ", got ", blank, ".");
  check_sizes(op, {"label", label}, label.sizes(), ScalarType::Long, {"x", x});
  check_like(op, {"f_len", f_len}, lattice.batch, ScalarType::Long, {"x", x});
  check_like(op, {"y_len", y_len}, lattice.batch, ScalarType::Long, {"x", x});
  lattice.f_len = data<int64_t>(f_len, "f_len");
  lattice.u_len = data<int64_t>(y_len, "y_len");
  lattice.labels = data<int64_t>(label, "label");
  if (ends) {
    check_like(op, {"batch_offset", ends}, lattice.batch, ScalarType::Long, {"x", x});
    lattice.ends = data<int64_t>(*ends, "batch_offset");
  }
  check_numbers(op, lattice);
  return lattice;
}

// Of what each row of x has, [..., more].
std::vector<int64_t> sizes_of_cells(const Tensor& x, std::initializer_list<int64_t> more = {}) {
  auto sizes = x.sizes();
  std::vector<int64_t> cells(sizes.begin(), sizes.end() - 1);
  cells.insert(cells.end(), more);
  return cells;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& x, const Tensor& label, const Tensor& f_len, const Tensor& y_len,
    const OptionalTensor& ends, int64_t blank, int64_t max_f_len, bool softmax) {
  const char* op = "transducer_loss_forward";
  Lattice lattice = lattice_of(op, x, label, f_len, y_len, ends, blank, max_f_len, softmax);
  const std::vector<int64_t> cells = sizes_of_cells(x), pairs = sizes_of_cells(x, {2});
  const ScalarType dtype = statistics_dtype(x);
  Tensor loss = empty(x, {lattice.batch}, dtype), maxima = empty(x, cells, dtype);
  Tensor sums_exp = empty(x, cells, dtype), scores = empty(x, pairs, dtype);
  Tensor alpha = empty(x, cells, ScalarType::Double);
  Tensor beta = empty(x, cells, ScalarType::Double);
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    TransducerScores<S> rows{lattice,
                             data<S>(x, "x"),
                             data<T>(maxima, "maxima"),
                             data<T>(sums_exp, "sums_exp"),
                             data<T>(scores, "scores"),
                             data<double>(alpha, "alpha"),
                             data<double>(beta, "beta")};
    rowwise(context, lattice.rows, lattice.classes, rows);
    samplewise(
        context, 2 * lattice.batch,
        TransducerWays<T>{lattice, rows.scores, rows.alpha, rows.beta, data<T>(loss, "loss")});
  });
  return {loss, maxima, sums_exp, scores, alpha, beta};
}

Tensor backward(const Tensor& grad_loss_of_any_layout, const Tensor& x, const Tensor& maxima,
                const Tensor& sums_exp, const Tensor& scores, const Tensor& alpha,
                const Tensor& beta, const Tensor& label, const Tensor& f_len, const Tensor& y_len,
                const OptionalTensor& ends, int64_t blank, int64_t max_f_len, bool softmax) {
  const char* op = "transducer_loss_backward";
  Lattice lattice = lattice_of(op, x, label, f_len, y_len, ends, blank, max_f_len, softmax);
  const ScalarType dtype = statistics_dtype(x);
  check_tensors(op, {{"grad_loss", grad_loss_of_any_layout}});
  Tensor grad_loss = as_contiguous(grad_loss_of_any_layout);  // often one number, expanded
  const std::vector<int64_t> cells = sizes_of_cells(x);
  const NamedTensor of_rows{"x", x};
  check_sizes(op, {"grad_loss", grad_loss}, std::array{lattice.batch}, dtype, of_rows);
  check_sizes(op, {"maxima", maxima}, cells, dtype, of_rows);
  check_sizes(op, {"sums_exp", sums_exp}, cells, dtype, of_rows);
  check_sizes(op, {"scores", scores}, sizes_of_cells(x, {2}), dtype, of_rows);
  check_sizes(op, {"alpha", alpha}, cells, ScalarType::Double, of_rows);
  check_sizes(op, {"beta", beta}, cells, ScalarType::Double, of_rows);
  Tensor grad_x = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    TransducerBackward<S> program{lattice,
                                  data<T>(grad_loss, "grad_loss"),
                                  data<S>(x, "x"),
                                  data<T>(maxima, "maxima"),
                                  data<T>(sums_exp, "sums_exp"),
                                  data<T>(scores, "scores"),
                                  data<double>(alpha, "alpha"),
                                  data<double>(beta, "beta"),
                                  data<S>(grad_x, "grad_x")};
    rowwise(context, lattice.rows, lattice.classes, program);
  });
  return grad_x;
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("transducer_loss_forward", TORCH_BOX(&forward));
  m.impl("transducer_loss_backward", TORCH_BOX(&backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
