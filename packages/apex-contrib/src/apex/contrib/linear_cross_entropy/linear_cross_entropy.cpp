// Registers logit_statistics and logit_gradients: checks, types and launch; the mathematics is in
// linear_cross_entropy.h.
#include "linear_cross_entropy.h"

#include <cmath>
#include <tuple>

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kStatistics = "logit_statistics";
constexpr const char* kGradients = "logit_gradients";

#if defined(APEX_CPU)
void check_labels(const char* op, const ChunkLabels& labels, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t label = labels.at(row);
    if (labels.is_class(label) || labels.is_padding(label)) continue;
    fail(op, ": labels[", row, "] is ", label, ", but there are ", labels.classes,
         " classes: expected 0 to ", labels.classes - 1, ", or padding_idx.");
  }
}
#else
void check_labels(const char*, const ChunkLabels&, int64_t) {}  // would wait for the GPU
#endif

// A chunk of logits, of which this rank has the classes from `first` on.
struct Chunk {
  const char* op;
  const Tensor& logits;  // [rows, columns], contiguous
  Tensor labels;
  ChunkLabels view;
  int64_t rows, columns;

  Chunk(const char* op, const Tensor& logits, const Tensor& given, int64_t first, int64_t classes,
        int64_t padding_idx, double softcap)
      : op(op), logits(logits) {
    check_tensors(op, {{"logits", logits}, {"labels", given}});
    check(logits.dim() == 2 && logits.is_contiguous(), op,
          ": logits must be contiguous and have shape [N, C], got ", describe(logits), ".");
    rows = logits.size(0), columns = logits.size(1);
    check(columns > 0 && first >= 0 && classes >= columns && first <= classes - columns, op,
          ": expected 0 <= first and first + C <= classes, got first = ", first, ", C = ", columns,
          ", classes = ", classes, ".");
    check(softcap >= 0, op, ": softcap must not be negative, got ", softcap, ".");
    check_vector("labels", given, ScalarType::Long);
    labels = as_contiguous(given);
    view = {data<int64_t>(labels, "labels"), classes, padding_idx};
    check_labels(op, view, rows);
  }
  Tensor vector() const { return empty(logits, {rows}, statistics_dtype(logits)); }
  // Of any strides: labels, and gradients, which often are one number, expanded.
  void check_vector(const char* name, const Tensor& tensor, ScalarType dtype) const {
    check_tensors(op, {{name, tensor}});
    check(tensor.dim() == 1 && tensor.size(0) == rows && tensor.scalar_type() == dtype &&
              tensor.is_cpu() == logits.is_cpu() &&
              tensor.get_device_index() == logits.get_device_index(),
          op, ": ", name, " must have shape [", rows, "], be ", dtype_name(dtype),
          " and be on the device of logits; got ", describe(tensor), ", logits is ",
          describe(logits), ".");
  }
  void check_statistics(const char* name, const Tensor& tensor) const {
    check_like(op, {name, tensor}, rows, statistics_dtype(logits), {"logits", logits});
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> statistics(const Tensor& logits, const Tensor& labels,
                                                      int64_t first, int64_t classes,
                                                      int64_t padding_idx, double softcap) {
  Chunk chunk(kStatistics, logits, labels, first, classes, padding_idx, softcap);
  Tensor maxima = chunk.vector(), sums_exp = chunk.vector(), targets = chunk.vector(),
         means = chunk.vector();
  Context context(logits);
  dispatch_floating(kStatistics, logits.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    const LogitStatistics<S> program{.logits = data<S>(logits, "logits"),
                                     .first = first,
                                     .labels = chunk.view,
                                     .maxima = data<T>(maxima, "maxima"),
                                     .sums_exp = data<T>(sums_exp, "sums_exp"),
                                     .targets = data<T>(targets, "targets"),
                                     .means = data<T>(means, "means")};
    if (softcap == 0) return rowwise(context, chunk.rows, chunk.columns, program);
    rowwise(context, chunk.rows, chunk.columns,
            CappedLogitStatistics<S>{program, static_cast<T>(softcap)});
  });
  return {maxima, sums_exp, targets, means};
}

void gradients(const Tensor& logits, const Tensor& labels, const Tensor& maxima,
               const Tensor& sums_exp, const Tensor& targets, const Tensor& grad_losses,
               int64_t first, int64_t classes, int64_t padding_idx, double smoothing, double z_loss,
               double softcap) {
  Chunk chunk(kGradients, logits, labels, first, classes, padding_idx, softcap);
  check(smoothing >= 0 && smoothing <= 1, kGradients, ": smoothing must be in [0, 1], got ",
        smoothing, ".");
  check(std::isfinite(z_loss), kGradients, ": z_loss must be finite, got ", z_loss, ".");
  chunk.check_vector("grad_losses", grad_losses, statistics_dtype(logits));
  Tensor grads = as_contiguous(grad_losses);
  chunk.check_statistics("maxima", maxima);
  chunk.check_statistics("sums_exp", sums_exp);
  chunk.check_statistics("targets", targets);
  Context context(logits);
  dispatch_floating(kGradients, logits.scalar_type(), [&]<class S>() {
    dispatch_bool(softcap != 0, [&]<bool kCapped>() {
      using T = compute_t<S>;
      rowwise(context, chunk.rows, chunk.columns,
              LogitGradients<S, kCapped>{
                  .logits = data<S>(logits, "logits"),
                  .cap = static_cast<T>(softcap),
                  .first = first,
                  .smoothing = static_cast<T>(smoothing),
                  .uniform = static_cast<T>(smoothing / static_cast<double>(classes)),
                  .z_loss = static_cast<T>(z_loss),
                  .labels = chunk.view,
                  .maxima = data<T>(maxima, "maxima"),
                  .sums_exp = data<T>(sums_exp, "sums_exp"),
                  .targets = data<T>(targets, "targets"),
                  .grad_losses = data<T>(grads, "grad_losses")});
    });
  });
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("logit_statistics", TORCH_BOX(&statistics));
  m.impl("logit_gradients", TORCH_BOX(&gradients));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
