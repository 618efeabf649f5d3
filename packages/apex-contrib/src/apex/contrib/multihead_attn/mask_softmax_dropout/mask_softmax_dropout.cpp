// Registers softmax of masked scores with dropout; its mathematics is in mask_softmax_dropout.h.
#include "mask_softmax_dropout.h"

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

using OptionalTensor = std::optional<Tensor>;
using TwoTensors = std::tuple<Tensor, Tensor>;

int64_t rows_of(const char* op, const char* name, const Tensor& x) {
  check_tensors(op, {{name, x}});
  check(x.dim() >= 1 && x.is_contiguous(), op, ": ", name, " must be contiguous rows, got ",
        describe(x), ".");
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

bool is_byte(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Bool || tensor.scalar_type() == ScalarType::Byte;
}

template <class M>
const M* values_of(const Tensor& mask) {
  if constexpr (std::is_same_v<M, uint8_t>) {
    return mask_data(mask, "mask");
  } else {
    return data<M>(mask, "mask");
  }
}

// body.template operator()<M>(Mask<M>) for the mask of these scores.
template <class S, class Body>
void with_mask(const char* op, const OptionalTensor& given, const Tensor& x, const Body& body) {
  using T = compute_t<S>;
  if (!given) return body(Mask<NoMask>{});
  const Tensor& mask = *given;
  check_tensors(op, {{"mask", mask}});
  check(x.dim() == 4 && mask.dim() == 3 && mask.size(0) == x.size(0) &&
            (mask.size(1) == 1 || mask.size(1) == x.size(2)) && mask.size(2) == x.size(3),
        op, ": mask must be [b, 1, sk] or [b, sq, sk] for scores [b, heads, sq, sk], got ",
        describe(mask), " for ", describe(x), ".");
  check(mask.stride(2) == 1 && (mask.size(1) == 1 || mask.stride(1) == mask.size(2)), op,
        ": mask must be contiguous but for its first dimension, got ", describe(mask), ".");
  check(mask.is_cpu() == x.is_cpu() && mask.get_device_index() == x.get_device_index(), op,
        ": mask must be on the device of scores; got ", describe(mask), ", scores is ", describe(x),
        ".");
  constexpr ScalarType kAdded = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  check(is_byte(mask) || mask.scalar_type() == kAdded, op, ": mask must be bool, uint8 or ",
        dtype_name(kAdded), ", got ", describe(mask), ".");
  auto of = [&]<class M>() {
    body(Mask<M>{values_of<M>(mask), x.size(1), x.size(2), mask.size(1), mask.stride(0)});
  };
  return is_byte(mask) ? of.template operator()<uint8_t>() : of.template operator()<T>();
}

Dropout dropout_of(const char* op, const Tensor& seed, double p, const char* name,
                   const Tensor& x) {
  check_like(op, {"seed", seed}, 1, ScalarType::Long, {name, x});
  check(p >= 0 && p <= 1, op, ": p must be in [0, 1], got ", p, ".");
  return {data<int64_t>(seed, "seed"), static_cast<float>(p), p < 1 ? 1 / (1 - p) : 0};
}

template <bool kDropout>
void write_softmax(const char* op, const Tensor& scores, const OptionalTensor& mask,
                   const Tensor& y, const Tensor& dropped, const Dropout& dropout) {
  const int64_t columns = scores.size(-1), rows = columns == 0 ? 0 : scores.numel() / columns;
  Context context(scores);
  dispatch_floating(op, scores.scalar_type(), [&]<class S>() {
    S* kept = kDropout ? data<S>(dropped, "dropped") : nullptr;
    with_mask<S>(op, mask, scores, [&]<class M>(const Mask<M>& of) {
      rowwise(context, rows, columns,
              MaskSoftmax<S, M, kDropout>{data<S>(scores, "scores"), of, data<S>(y, "y"), kept,
                                          dropout});
    });
  });
}

Tensor mask_softmax_forward(const Tensor& scores, const OptionalTensor& mask) {
  const char* op = "mask_softmax_forward";
  rows_of(op, "scores", scores);
  Tensor y = empty_like(scores, scores.scalar_type());
  write_softmax<false>(op, scores, mask, y, y, {});
  return y;
}

TwoTensors mask_softmax_dropout_forward(const Tensor& scores, const OptionalTensor& mask,
                                        const Tensor& seed, double p, int64_t first, int64_t rows,
                                        int64_t columns) {
  const char* op = "mask_softmax_dropout_forward";
  rows_of(op, "scores", scores);
  Dropout dropout = dropout_of(op, seed, p, "scores", scores);
  int64_t dims = scores.dim(), queries = dims < 2 ? 1 : scores.size(dims - 2);
  bool is_corner = first >= 0 && rows >= queries && columns >= scores.size(dims - 1);
  check(is_corner || (first == 0 && rows == 0 && columns == 0), op, ": rows and columns must be ",
        "at least those of the scores and first at least 0, or all three 0; got first ", first,
        ", rows ", rows, " and columns ", columns, " for ", describe(scores), ".");
  dropout.corner = {queries, first, rows, columns};
  Tensor y = empty_like(scores, scores.scalar_type()), dropped = empty_like(y, y.scalar_type());
  write_softmax<true>(op, scores, mask, y, dropped, dropout);
  return {dropped, y};
}

Tensor mask_softmax_backward(const Tensor& dy_of_any_layout, const Tensor& y) {
  const char* op = "mask_softmax_backward";
  int64_t rows = rows_of(op, "y", y);
  check_tensors(op, {{"dy", dy_of_any_layout}});
  Tensor dy = as_contiguous(dy_of_any_layout);
  check_sizes(op, {"dy", dy}, y.sizes(), y.scalar_type(), {"y", y});
  Tensor dx = empty_like(y, y.scalar_type());
  Context context(y);
  dispatch_floating(op, y.scalar_type(), [&]<class S>() {
    rowwise(context, rows, y.size(-1),
            MaskSoftmaxBackward<S>{data<S>(dy, "dy"), data<S>(y, "y"), data<S>(dx, "dx")});
  });
  return dx;
}

Tensor mask_softmax_dropout_backward(const Tensor& dy_of_any_layout,
                                     const OptionalTensor& dsoftmax_of_any_layout, const Tensor& y,
                                     const Tensor& keep, double p) {
  const char* op = "mask_softmax_dropout_backward";
  int64_t rows = rows_of(op, "softmax", y);
  check_tensors(op,
                {{"dy", dy_of_any_layout}, {"dsoftmax", dsoftmax_of_any_layout}, {"keep", keep}});
  Tensor dy = as_contiguous(dy_of_any_layout), dsoftmax;
  const NamedTensor softmax{"softmax", y};
  check_sizes(op, {"dy", dy}, y.sizes(), y.scalar_type(), softmax);
  check_sizes(op, {"keep", keep}, y.sizes(), is_byte(keep) ? keep.scalar_type() : y.scalar_type(),
              softmax);
  check(p >= 0 && p <= 1, op, ": p must be in [0, 1], got ", p, ".");
  if (dsoftmax_of_any_layout) {
    dsoftmax = as_contiguous(*dsoftmax_of_any_layout);
    check_sizes(op, {"dsoftmax", dsoftmax}, y.sizes(), y.scalar_type(), softmax);
  }
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  Tensor dx = empty_like(y, y.scalar_type());
  Context context(y);
  dispatch_floating(op, y.scalar_type(), [&]<class S>() {
    auto run = [&]<class K>(const K* kept) {
      rowwise(context, rows, y.size(-1),
              MaskSoftmaxDropoutBackward<S, K>{
                  data<S>(dy, "dy"), data<S>(y, "softmax"), kept,
                  dsoftmax.defined() ? data<S>(dsoftmax, "dsoftmax") : nullptr, data<S>(dx, "dx"),
                  scale});
    };
    return is_byte(keep) ? run(mask_data(keep, "keep"))
                         : run(static_cast<const S*>(data<S>(keep, "keep")));
  });
  return dx;
}

Tensor drop(const char* op, const char* name, const Tensor& x, const Tensor& seed, double p) {
  int64_t rows = rows_of(op, name, x);
  Dropout dropout = dropout_of(op, seed, p, name, x);
  Tensor y = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    rowwise(context, rows, x.size(-1),
            DropoutOfRows<S>{data<S>(x, name), data<S>(y, "y"), dropout});
  });
  return y;
}

Tensor seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  return drop("seeded_dropout", "x", x, seed, p);
}

Tensor seeded_dropout_backward(const Tensor& dy, const Tensor& seed, double p) {
  const char* op = "seeded_dropout_backward";
  check_tensors(op, {{"dy", dy}});
  return drop(op, "dy", as_contiguous(dy), seed, p);
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("mask_softmax_forward", TORCH_BOX(&mask_softmax_forward));
  m.impl("mask_softmax_backward", TORCH_BOX(&mask_softmax_backward));
  m.impl("mask_softmax_dropout_forward", TORCH_BOX(&mask_softmax_dropout_forward));
  m.impl("mask_softmax_dropout_backward", TORCH_BOX(&mask_softmax_dropout_backward));
  m.impl("seeded_dropout", TORCH_BOX(&seeded_dropout));
  m.impl("seeded_dropout_backward", TORCH_BOX(&seeded_dropout_backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
