// Registers scale, scale_ and axpby, with which gradients are unscaled and tested: checks, types,
// launch. The mathematics is in apex/math/scale.h and apex/math/axpby.h.
#include "apex/engine/foreach.h"
#include "apex/math/axpby.h"
#include "apex/math/scale.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::amp {
inline namespace APEX_BACKEND_NS {
namespace {

// Calls body<S, D>() for the dtypes of a source and a destination; float64 only goes with itself.
template <class Body>
void dispatch_pair(const char* op, const Tensor& source, const Tensor& destination, Body&& body) {
  dispatch_floating(op, source.scalar_type(), [&]<class S>() {
    dispatch_floating(op, destination.scalar_type(), [&]<class D>() {
      if constexpr (std::is_same_v<S, double> == std::is_same_v<D, double>) {
        body.template operator()<S, D>();
      } else {
        fail(op, ": float64 does not mix with other dtypes; got ", dtype_name(source.scalar_type()),
             " and ", dtype_name(destination.scalar_type()), ".");
      }
    });
  });
}

void scale(const TensorList& inputs, const TensorList& outputs, const Tensor& found_inf,
           double factor) {
  const char* op = "apex_amp::scale";
  TensorTable table =
      make_table(op, {{"inputs", inputs, Use::kRead}, {"outputs", outputs, Use::kWritten}});
  if (inputs.empty()) return;
  int* flag = number_near<int>(op, "found_inf", found_inf, inputs[0]);
  Context context(inputs[0]);
  dispatch_pair(op, inputs[0], outputs[0], [&]<class S, class D>() {
    using T = compute_t<S>;
    foreach<In<S>, Out<D>>(context, table, Scale<T>{static_cast<T>(factor), flag});
  });
}

void scale_(const TensorList& tensors, const Tensor& found_inf, double factor) {
  const char* op = "apex_amp::scale_";
  TensorTable table = make_table(op, {{"tensors", tensors, Use::kWritten}});
  if (tensors.empty()) return;
  int* flag = number_near<int>(op, "found_inf", found_inf, tensors[0]);
  Context context(tensors[0]);
  dispatch_floating(op, tensors[0].scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    foreach<InOut<S>>(context, table, ScaleInPlace<T>{static_cast<T>(factor), flag});
  });
}

void axpby(const TensorList& xs, const TensorList& ys, const TensorList& outputs,
           const Tensor& found_inf, double a, double b, int64_t arg_to_check) {
  const char* op = "apex_amp::axpby";
  TensorTable table = make_table(
      op, {{"xs", xs, Use::kRead}, {"ys", ys, Use::kRead}, {"outputs", outputs, Use::kWritten}});
  check(arg_to_check >= -1 && arg_to_check <= 1, op,
        ": arg_to_check must be 0 (xs), 1 (ys) or -1 (both), got ", arg_to_check, ".");
  if (xs.empty()) return;
  check(ys[0].scalar_type() == outputs[0].scalar_type(), op,
        ": ys and outputs must have one dtype,", " got ", dtype_name(ys[0].scalar_type()), " and ",
        dtype_name(outputs[0].scalar_type()), ".");
  int* flag = number_near<int>(op, "found_inf", found_inf, xs[0]);
  Context context(xs[0]);
  dispatch_pair(op, xs[0], outputs[0], [&]<class S, class D>() {
    using T = compute_t<S>;
    foreach<In<S>, In<D>, Out<D>>(
        context, table,
        Axpby<T>{static_cast<T>(a), static_cast<T>(b), static_cast<int>(arg_to_check), flag});
  });
}

}  // namespace

APEX_KERNELS(apex_amp, m) {
  m.impl("scale", TORCH_BOX(&scale));
  m.impl("scale_", TORCH_BOX(&scale_));
  m.impl("axpby", TORCH_BOX(&axpby));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::amp
