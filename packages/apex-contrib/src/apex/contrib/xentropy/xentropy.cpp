// Registers softmax_xentropy_forward and softmax_xentropy_backward: checks, types and launch; the
// mathematics is in xentropy.h.
#include "xentropy.h"

#include <optional>
#include <tuple>

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kForward = "softmax_xentropy_forward";
constexpr const char* kBackward = "softmax_xentropy_backward";

// What both ops read alike, after the checks that make walking it safe.
struct Operands {
  Tensor logits;  // [rows, columns], a row's elements adjacent
  Tensor labels;  // [rows] int64, contiguous
  Labels view;
  int64_t rows, columns, stride;
};

void check_vector(const char* op, const char* name, const Tensor& tensor, int64_t rows,
                  const Tensor& logits) {
  check_tensors(op, {{name, tensor}});
  check(tensor.dim() == 1 && tensor.size(0) == rows && tensor.is_cpu() == logits.is_cpu() &&
            tensor.get_device_index() == logits.get_device_index(),
        op, ": ", name, " must have shape [", rows, "] and be on the device of logits; got ",
        describe(tensor), ", logits is ", describe(logits), ".");
}

#if defined(APEX_CPU)
void check_labels(const char* op, const Labels& labels, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    int64_t label = labels.at(row);
    if (labels.is_class(label) || labels.is_padding(label)) continue;
    fail(op, ": labels[", row, "] is ", label, ", but logits has ", labels.columns,
         " classes: expected 0 to ", labels.columns - 1, ", or padding_idx.");
  }
}
#else
void check_labels(const char*, const Labels&, int64_t) {}  // would wait for the GPU
#endif

Operands operands(const char* op, const Tensor& logits, const Tensor& labels, double smoothing,
                  std::optional<int64_t> padding_idx) {
  check_tensors(op, {{"logits", logits}, {"labels", labels}});
  check(smoothing >= 0 && smoothing <= 1, op, ": smoothing must be in [0, 1], got ", smoothing,
        ".");
  check(logits.dim() == 2, op, ": logits must have shape [N, C], got ", describe(logits), ".");
  int64_t rows = logits.size(0), columns = logits.size(1);
  check(columns > 0, op, ": logits has no classes: ", describe(logits), ".");
  check(labels.scalar_type() == ScalarType::Long, op, ": labels must be int64, got ",
        describe(labels), ".");
  check_vector(op, "labels", labels, rows, logits);
  bool is_adjacent = columns == 1 || logits.stride(1) == 1;
  Operands o{
      is_adjacent ? logits : as_contiguous(logits), as_contiguous(labels), {}, rows, columns, 0};
  o.stride = o.logits.stride(0);
  o.view = {data<int64_t>(o.labels, "labels"), columns, padding_idx.value_or(0),
            padding_idx.has_value()};
  check_labels(op, o.view, rows);
  return o;
}

// Calls body<S, L>() for the storage types of logits and losses: L is S, or float for 16 bits.
template <class Body>
void dispatch_pair(const char* op, const char* name, ScalarType logits, ScalarType losses,
                   Body&& body) {
  dispatch_floating(op, logits, [&]<class S>() {
    if (losses == logits) return body.template operator()<S, S>();
    if constexpr (sizeof(S) == 2) {
      if (losses == ScalarType::Float) return body.template operator()<S, float>();
    }
    fail(op, ": ", name, " must have the dtype of logits, or float32 for 16-bit logits; got ",
         dtype_name(losses), " for ", dtype_name(logits), " logits.");
  });
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& logits, const Tensor& labels,
                                           double smoothing, std::optional<int64_t> padding_idx,
                                           bool half_to_float) {
  Operands o = operands(kForward, logits, labels, smoothing, padding_idx);
  ScalarType dtype = half_to_float ? ScalarType::Float : logits.scalar_type();
  Tensor losses = empty(logits, {o.rows}, dtype);
  Tensor maxima = empty(logits, {o.rows}, statistics_dtype(logits));
  Tensor sums_exp = empty(logits, {o.rows}, statistics_dtype(logits));
  Context context(logits);
  dispatch_pair(kForward, "losses", logits.scalar_type(), dtype, [&]<class S, class L>() {
    using T = compute_t<S>;
    XentropyForward<S, L> program{.logits = data<S>(o.logits, "logits"),
                                  .stride = o.stride,
                                  .smoothing = static_cast<T>(smoothing),
                                  .labels = o.view,
                                  .losses = data<L>(losses, "losses"),
                                  .maxima = data<T>(maxima, "maxima"),
                                  .sums_exp = data<T>(sums_exp, "sums_exp")};
    rowwise(context, o.rows, o.columns, program);
  });
  return {losses, maxima, sums_exp};
}

Tensor backward(const Tensor& grad_losses, const Tensor& logits, const Tensor& maxima,
                const Tensor& sums_exp, const Tensor& labels, double smoothing,
                std::optional<int64_t> padding_idx) {
  Operands o = operands(kBackward, logits, labels, smoothing, padding_idx);
  check_vector(kBackward, "grad_losses", grad_losses, o.rows, logits);
  check_vector(kBackward, "maxima", maxima, o.rows, logits);
  check_vector(kBackward, "sums_exp", sums_exp, o.rows, logits);
  const ScalarType dtype = statistics_dtype(logits);
  for (const NamedTensor& given : {NamedTensor{"maxima", maxima}, {"sums_exp", sums_exp}}) {
    check(given.tensor->scalar_type() == dtype, kBackward, ": ", given.name, " must be ",
          dtype_name(dtype), ", got ", dtype_name(given.tensor->scalar_type()), ".");
  }
  Tensor grads = as_contiguous(grad_losses);  // often one number, expanded
  Tensor max = as_contiguous(maxima), sum_exp = as_contiguous(sums_exp);
  Tensor grad_logits = empty_like(logits, logits.scalar_type());
  Context context(logits);
  dispatch_pair(kBackward, "grad_losses", logits.scalar_type(), grads.scalar_type(),
                [&]<class S, class L>() {
                  using T = compute_t<S>;
                  XentropyBackward<S, L> program{
                      .logits = data<S>(o.logits, "logits"),
                      .stride = o.stride,
                      .smoothing = static_cast<T>(smoothing),
                      .uniform = static_cast<T>(smoothing / static_cast<double>(o.columns)),
                      .labels = o.view,
                      .maxima = data<T>(max, "maxima"),
                      .sums_exp = data<T>(sum_exp, "sums_exp"),
                      .grad_losses = data<L>(grads, "grad_losses"),
                      .grad_logits = data<S>(grad_logits, "grad_logits")};
                  rowwise(context, o.rows, o.columns, program);
                });
  return grad_logits;
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("softmax_xentropy_forward", TORCH_BOX(&forward));
  m.impl("softmax_xentropy_backward", TORCH_BOX(&backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
