// Registers float16_product: shapes, layouts, one product per matrix of a batch. CPUs alone.
#include "apex/core/config.h"

#if defined(APEX_CPU)
#include <optional>

#include "apex/torch/library.h"
#include "apex/torch/like.h"
#include "float16_product.h"

namespace apex::amp {
inline namespace APEX_BACKEND_NS {
namespace {

// The strides of a tensor as [batch, rows, columns], with 0 where it is repeated.
struct Layout {
  const Half* data;
  int64_t sizes[3], strides[3];

  explicit Layout(const Tensor& tensor) : data(static_cast<const Half*>(tensor.data_ptr())) {
    int64_t dims = tensor.dim();
    for (int64_t d = 0; d < 3; ++d) {
      int64_t own = d - (3 - dims);
      sizes[d] = own < 0 ? 1 : tensor.size(own);
      strides[d] = sizes[d] == 1 ? 0 : tensor.stride(own);
    }
    // Of one column, as good as contiguous.
    if (sizes[2] == 1) strides[2] = 1;
  }

  Matrix at(int64_t batch) const {
    return {data + batch * strides[0], sizes[1], sizes[2], strides[1], strides[2]};
  }
};

Tensor float16_product(const std::optional<Tensor>& added, const Tensor& a, const Tensor& b,
                       double beta, double alpha) {
  const char* op = "float16_product";
  int64_t dims = a.dim();
  check((dims == 2 || dims == 3) && b.dim() == dims && a.size(dims - 1) == b.size(dims - 2) &&
            (dims == 2 || a.size(0) == b.size(0)),
        op, ": these shapes cannot be multiplied; a and b must be [M, K] and [K, N], or ",
        "[batch, M, K] and [batch, K, N], got ", describe(a), " and ", describe(b), ".");
  for (const Tensor* operand : {&a, &b, added ? &*added : &a}) {
    check(operand->scalar_type() == ScalarType::Half, op,
          ": added, a and b must be float16; one of them is ", describe(*operand), ".");
  }
  Layout left(a), right(b), addend(added ? *added : a);
  int64_t batches = left.sizes[0], rows = left.sizes[1], columns = right.sizes[2];
  int64_t result[] = {batches, rows, columns};
  Tensor y = empty(a, {result + 3 - dims, result + 3}, ScalarType::Half);
  if (!added) beta = 0;
  if (beta != 0) {
    bool expands = added->dim() <= dims;
    for (int d = 0; d < 3; ++d) {
      expands = expands && (addend.sizes[d] == 1 || addend.sizes[d] == result[d]);
      if (addend.sizes[d] == 1) addend.strides[d] = 0;
    }
    check(expands, op, ": added must be expandable to the shape of a @ b, which is ", describe(y),
          "; got ", describe(*added), ".");
  }
  SmallProduct product;
  for (int64_t i = 0; i < batches; ++i) {
    Scaled scaled = {static_cast<float>(alpha), static_cast<float>(beta), addend.at(i)};
    Half* target = static_cast<Half*>(y.mutable_data_ptr()) + i * rows * columns;
    product.run(left.at(i), right.at(i), scaled, target, columns, 1);
  }
  return y;
}

}  // namespace

APEX_KERNELS(apex_amp, m) { m.impl("float16_product", TORCH_BOX(&float16_product)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::amp
#endif
