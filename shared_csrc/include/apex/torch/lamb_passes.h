// The two passes of a LAMB step, which a caller with shards takes one by one.
#pragma once

#include <initializer_list>
#include <optional>

#include "apex/torch/dispatch.h"
#include "apex/torch/table_columns.h"
#include "apex/torch/tensor_table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// The first pass leaves the squares of norms, which the second needs; [tensors, 2].
struct Passes {
  bool first, second;
  double* squares;
  bool rounds_stochastically = false;  // the second one
};

// Both passes without `squares`; with them the one that was asked for.
inline Passes chosen_passes(const char* op, const std::optional<Tensor>& squares, int64_t only_pass,
                            const TensorList& params) {
  if (!squares) {
    check(only_pass == 0, op, ": only_pass ", only_pass, " needs squares.");
    return {true, true, nullptr};
  }
  check_tensors(op, {{"squares", *squares}});
  check(only_pass == 1 || only_pass == 2, op, ": with squares only_pass must be 1 or 2, got ",
        only_pass, ".");
  const Tensor& like = params[0];
  check(squares->numel() == 2 * static_cast<int64_t>(params.size()) && squares->is_contiguous() &&
            squares->scalar_type() == ScalarType::Double && squares->is_cpu() == like.is_cpu() &&
            squares->get_device_index() == like.get_device_index(),
        op, ": squares must be contiguous, two numbers per tensor (", 2 * params.size(),
        "), float64, on the device of the tensors (", describe(like), "), got ", describe(*squares),
        ".");
  return {only_pass == 1, only_pass == 2, data<double>(*squares, "squares")};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
