// Registers a dense layer's products with fused epilogues: checks, and what the library is given.
// There is nothing here for CPUs.
#include "apex/core/config.h"

#if defined(APEX_GPU)
#include <optional>
#include <tuple>

#include "apex/torch/blaslt.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

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

// What a product is written to. Factors that are no matrices are refused by product_of().
Tensor result_of(const blaslt::Factor& left, const blaslt::Factor& right) {
  const Tensor& like = left.matrix;
  if (like.dim() != 2 || right.matrix.dim() != 2) return like;
  int64_t rows = like.size(left.is_transposed ? 1 : 0);
  int64_t columns = right.matrix.size(right.is_transposed ? 0 : 1);
  return empty(like, {rows, columns}, like.scalar_type());
}

std::tuple<Tensor, Tensor, int64_t> dense_gelu_blaslt(const Tensor& x, const Tensor& weight,
                                                      std::optional<Tensor> bias) {
  const char* op = "dense_gelu_blaslt";
  blaslt::Factor left = {"x", x}, right = {"weight", weight, true};
  Tensor y = result_of(left, right), gelu_in = result_of(left, right);
  auto epilogue = bias ? Epilogue::kGeluAuxBias : Epilogue::kGeluAux;
  auto product = blaslt::product_of(op, left, right, {"y", y}, epilogue);
  if (bias) product.bias = vector_of(op, "bias", *bias, y.size(1), {"x", x});
  product.aux = operand(gelu_in, "gelu_in");
  return {y, gelu_in, multiply(x, product)};
}

std::tuple<Tensor, Tensor, int64_t> dense_gelu_backward_blaslt(const Tensor& dy,
                                                               const Tensor& weight,
                                                               const Tensor& gelu_in,
                                                               bool bias_grad) {
  const char* op = "dense_gelu_backward_blaslt";
  blaslt::Factor left = {"dy", dy}, right = {"weight", weight};
  Tensor dx = result_of(left, right);
  auto epilogue = bias_grad ? Epilogue::kDGeluBiasGrad : Epilogue::kDGelu;
  auto product = blaslt::product_of(op, left, right, {"dx", dx}, epilogue);
  Tensor dbias = empty(dy, {bias_grad ? dx.size(1) : 0}, dy.scalar_type());
  if (bias_grad) product.bias = operand(dbias, "dbias");
  check_tensors(op, {{"gelu_in", gelu_in}});
  blaslt::check_matrix(op, {"gelu_in", gelu_in}, dx.size(0), dx.size(1), dx.scalar_type(),
                       {"dy", dy});
  product.aux = operand(gelu_in, "gelu_in");
  return {dx, dbias, multiply(dy, product)};
}

std::tuple<Tensor, Tensor, int64_t> dense_gradients_blaslt(const Tensor& dy, const Tensor& x) {
  const char* op = "dense_gradients_blaslt";
  blaslt::Factor left = {"dy", dy, true}, right = {"x", x};
  Tensor dweight = result_of(left, right);
  auto product = blaslt::product_of(op, left, right, {"dweight", dweight}, Epilogue::kBiasGradB);
  Tensor dbias = empty(dy, {dweight.size(0)}, dy.scalar_type());
  product.bias = operand(dbias, "dbias");
  return {dweight, dbias, multiply(dy, product)};
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
