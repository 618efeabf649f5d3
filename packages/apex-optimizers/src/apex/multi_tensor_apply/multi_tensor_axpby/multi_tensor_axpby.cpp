// Registers multi_tensor_axpby: checks, types and launch; the mathematics is in math/axpby.h.
#include "apex/engine/foreach.h"
#include "apex/math/axpby.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/tensor_table.h"

namespace apex::multi_tensor_apply {
inline namespace APEX_BACKEND_NS {
namespace {

constexpr const char* kOp = "multi_tensor_axpby";

// Calls body<X, Y, Z>() for the three lists' dtypes. Double combines with double only: 37 kernels
// less, for mixtures that nothing produces.
template <class Body>
void dispatch_three(ScalarType x, ScalarType y, ScalarType out, Body&& body) {
  dispatch_floating(kOp, x, [&]<class X>() {
    dispatch_floating(kOp, y, [&]<class Y>() {
      dispatch_floating(kOp, out, [&]<class Z>() {
        constexpr int kDoubles =
            std::is_same_v<X, double> + std::is_same_v<Y, double> + std::is_same_v<Z, double>;
        if constexpr (kDoubles == 0 || kDoubles == 3) {
          body.template operator()<X, Y, Z>();
        } else {
          fail(kOp, ": float64 lists combine with float64 lists only, got xs ", dtype_name(x),
               ", ys ", dtype_name(y), ", outputs ", dtype_name(out), ".");
        }
      });
    });
  });
}

void multi_tensor_axpby(const TensorList& xs, const TensorList& ys, const TensorList& outputs,
                        const Tensor& flag, double a, double b, int64_t arg_to_check) {
  check(arg_to_check >= -1 && arg_to_check <= 1, kOp,
        ": arg_to_check must be 0 (xs), 1 (ys) or -1 (both), got ", arg_to_check, ".");
  TensorTable table = make_table(
      kOp, {{"xs", xs, Use::kRead}, {"ys", ys, Use::kRead}, {"outputs", outputs, Use::kWritten}});
  if (xs.empty()) return;
  int* flag_data = number_near<int>(kOp, "flag", flag, xs[0]);
  Context context(xs[0]);
  dispatch_three(xs[0].scalar_type(), ys[0].scalar_type(), outputs[0].scalar_type(),
                 [&]<class X, class Y, class Z>() {
                   using T = compute_t<X>;
                   foreach<In<X>, In<Y>, Out<Z>>(
                       context, table,
                       Axpby<T>{static_cast<T>(a), static_cast<T>(b),
                                static_cast<int>(arg_to_check), flag_data});
                 });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) { m.impl("multi_tensor_axpby", TORCH_BOX(&multi_tensor_axpby)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::multi_tensor_apply
