// What the ops of this folder check alike, and how they choose kernels for their dtypes.
#pragma once

#include <optional>

#include "add.h"
#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "apex/math/norm/affine.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::normalization {
inline namespace APEX_BACKEND_NS {

using OptionalTensor = std::optional<Tensor>;

// Calls body<X, S, W>(): one type for all; for 16-bit x also float32 weights, and float32 weights
// with a float32 sum. Python casts other combinations to one of these.
template <class Body>
void dispatch_types(const char* op, ScalarType x, ScalarType sum, ScalarType weight, Body&& body) {
  dispatch_floating(op, x, [&]<class X>() {
    if (sum == x && weight == x) return body.template operator()<X, X, X>();
    if constexpr (sizeof(X) == 2) {
      bool float_weight = weight == ScalarType::Float;
      if (float_weight && sum == x) return body.template operator()<X, X, float>();
      if (float_weight && sum == weight) return body.template operator()<X, float, float>();
    }
    fail(op, ": no kernel for x in ", dtype_name(x), " with a sum in ", dtype_name(sum),
         " and weight in ", dtype_name(weight), ".");
  });
}

// What forward and backward of both normalizations check alike. `x` is dy in the backward, `sum`
// the residual in the forward: they come by their arguments' names.
struct Operands {
  const char* op;
  NamedTensor named_x;
  const Tensor &x, &sum, &weight;
  int64_t columns;
  int64_t rows = 0;

  Operands(const char* op, const NamedTensor& of_x, const NamedTensor& of_sum, const Tensor& weight,
           int64_t columns)
      : op(op),
        named_x(of_x),
        x(*of_x.tensor),
        sum(*of_sum.tensor),
        weight(weight),
        columns(columns) {
    check_tensors(op, {of_x, of_sum, {"weight", weight}});
    check(columns > 0, op, ": columns must be positive, got ", columns, ".");
    check(x.numel() % columns == 0, op, ": ", of_x.name, " has ", x.numel(),
          " elements, which is no multiple of columns = ", columns, ".");
    rows = x.numel() / columns;
    check(x.is_contiguous(), op, ": ", of_x.name, " must be contiguous, got ", describe(x), ".");
    check_sizes(op, of_sum, x.sizes(), sum.scalar_type(), of_x);
    check_like(op, {"weight", weight}, columns, weight.scalar_type(), of_x);
  }
  void check_statistics(const char* name, const Tensor& tensor) const {
    check_like(op, {name, tensor}, rows, statistics_dtype(x), named_x);
  }
  template <class W, class T>
  Affine<W, T> affine(const OptionalTensor& bias, bool zero_centered_gamma) const {
    auto pointer = [](const Tensor& tensor, const char* name) {
      return static_cast<const W*>(memory_of(tensor, name));
    };
    return {pointer(weight, "weight"), pointer(bias.value_or(weight), "bias"),
            Scale<T>(true, zero_centered_gamma), ValueOr<T>(bias.has_value(), T(0))};
  }
  Tensor statistics() const { return empty(x, {rows}, statistics_dtype(x)); }

  template <class Body>
  void dispatch(Body&& body) const {
    dispatch_types(op, x.scalar_type(), sum.scalar_type(), weight.scalar_type(), body);
  }
};

// Memory for the gradients of x and residual: one tensor where they have one dtype.
struct GradTensors {
  OptionalTensor dsum;
  Tensor dresidual, dx;

  GradTensors(const Operands& o, const OptionalTensor& dsum)
      : dresidual(empty_like(o.x, o.sum.scalar_type())),
        dx(empty(o.x, {o.x.scalar_type() == o.sum.scalar_type() ? 0 : o.x.numel()},
                 o.x.scalar_type())) {
    check_tensors(o.op, {{"dsum", dsum}});
    if (!dsum) return;
    this->dsum = as_contiguous(*dsum);
    check_sizes(o.op, {"dsum", this->dsum}, o.x.sizes(), o.sum.scalar_type(), o.named_x);
  }
  template <class X, class S, bool kHasSumGrad>
  InputGrads<X, S, kHasSumGrad> pointers() const {
    return {kHasSumGrad ? data<S>(*dsum, "dsum") : nullptr, data<S>(dresidual, "dresidual"),
            data<X>(dx, "dx")};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::normalization
