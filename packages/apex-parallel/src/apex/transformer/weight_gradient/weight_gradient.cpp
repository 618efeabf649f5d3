// Registers the product that adds a weight's gradient to a float32 buffer. There is nothing here
// for CPUs.
#include "apex/core/config.h"

#if defined(APEX_GPU)
#include "apex/torch/blaslt.h"
#include "apex/torch/library.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {
namespace {

int64_t add_weight_gradient_blaslt(const Tensor& x, const Tensor& dy, const Tensor& main_grad) {
  const char* op = "add_weight_gradient_blaslt";
  auto epilogue = blaslt::Epilogue::kNone;
  auto product =
      blaslt::product_of(op, {"dy", dy, true}, {"x", x}, {"main_grad", main_grad}, epilogue, 1);
  check(main_grad.scalar_type() == ScalarType::Float, op, ": main_grad must be float32, got ",
        describe(main_grad), ".");
  Context context(x);
  return static_cast<int64_t>(blaslt::BlasLt::instance().multiply(context, x, product));
}

}  // namespace

APEX_KERNELS(apex_parallel, m) {
  m.impl("add_weight_gradient_blaslt", TORCH_BOX(&add_weight_gradient_blaslt));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
#endif
