// What the ops of this folder check alike.
#pragma once

#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"
#include "xentropy.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {

inline void check_vector(const char* op, const char* name, const Tensor& tensor, int64_t rows,
                         const Tensor& logits) {
  check_tensors(op, {{name, tensor}});
  check(tensor.dim() == 1 && tensor.size(0) == rows && tensor.is_cpu() == logits.is_cpu() &&
            tensor.get_device_index() == logits.get_device_index(),
        op, ": ", name, " must have shape [", rows, "] and be on the device of logits; got ",
        describe(tensor), ", logits is ", describe(logits), ".");
}

inline void check_labels_tensor(const char* op, const Tensor& labels, int64_t rows,
                                const Tensor& logits) {
  check(labels.scalar_type() == ScalarType::Long, op, ": labels must be int64, got ",
        describe(labels), ".");
  check_vector(op, "labels", labels, rows, logits);
}

#if defined(APEX_CPU)
inline void check_labels(const char* op, const Labels& labels, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    int64_t label = labels.at(row);
    if (labels.is_class(label) || labels.is_padding(label)) continue;
    fail(op, ": labels[", row, "] is ", label, ", but logits has ", labels.columns,
         " classes: expected 0 to ", labels.columns - 1, ", or padding_idx.");
  }
}
#else
inline void check_labels(const char*, const Labels&, int64_t) {}  // would wait for the GPU
#endif

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
