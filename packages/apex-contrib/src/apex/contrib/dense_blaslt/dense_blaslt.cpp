// Registers a dense layer's products with fused epilogues: checks, and what the library is given.
// There is nothing here for CPUs.
#include "apex/core/config.h"

#if defined(APEX_GPU)
#include <optional>

#include "apex/torch/blaslt.h"
#include "apex/torch/library.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

using blaslt::Epilogue;

int64_t multiply(const Tensor& like, const blaslt::Product& product) {
  Context context(like);
  return static_cast<int64_t>(blaslt::BlasLt::instance().multiply(context, like, product));
}

void* vector_of(const char* op, const char* name, const Tensor& vector, int64_t size,
                const NamedTensor& like) {
  check_like(op, {name, vector}, size, like.tensor->scalar_type(), like);
  return operand(vector, name);
}

void* aux_of(const char* op, const char* name, const Tensor& aux, const NamedTensor& result) {
  check_tensors(op, {{name, aux}});
  const Tensor& like = *result.tensor;
  blaslt::check_matrix(op, {name, aux}, like.size(0), like.size(1), like.scalar_type(), result);
  return operand(aux, name);
}

int64_t dense_gelu_blaslt(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                          const Tensor& y, const Tensor& gelu_in) {
  const char* op = "dense_gelu_blaslt";
  auto epilogue = bias ? Epilogue::kGeluAuxBias : Epilogue::kGeluAux;
  auto product = blaslt::product_of(op, {"x", x}, {"weight", weight, true}, {"y", y}, epilogue);
  if (bias) product.bias = vector_of(op, "bias", *bias, y.size(1), {"x", x});
  product.aux = aux_of(op, "gelu_in", gelu_in, {"y", y});
  return multiply(x, product);
}

int64_t dense_gelu_backward_blaslt(const Tensor& dy, const Tensor& weight, const Tensor& gelu_in,
                                   const Tensor& dx, std::optional<Tensor> dbias) {
  const char* op = "dense_gelu_backward_blaslt";
  auto epilogue = dbias ? Epilogue::kDGeluBiasGrad : Epilogue::kDGelu;
  auto product = blaslt::product_of(op, {"dy", dy}, {"weight", weight}, {"dx", dx}, epilogue);
  if (dbias) product.bias = vector_of(op, "dbias", *dbias, dx.size(1), {"dy", dy});
  product.aux = aux_of(op, "gelu_in", gelu_in, {"dx", dx});
  return multiply(dy, product);
}

int64_t dense_gradients_blaslt(const Tensor& dy, const Tensor& x, const Tensor& dweight,
                               const Tensor& dbias) {
  const char* op = "dense_gradients_blaslt";
  auto product = blaslt::product_of(op, {"dy", dy, true}, {"x", x}, {"dweight", dweight},
                                    Epilogue::kBiasGradB);
  product.bias = vector_of(op, "dbias", dbias, dweight.size(0), {"dy", dy});
  return multiply(dy, product);
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("dense_gelu_blaslt", TORCH_BOX(&dense_gelu_blaslt));
  m.impl("dense_gelu_backward_blaslt", TORCH_BOX(&dense_gelu_backward_blaslt));
  m.impl("dense_gradients_blaslt", TORCH_BOX(&dense_gradients_blaslt));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
#endif
