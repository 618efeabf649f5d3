// Registers rotary embeddings: checks, types and launch; the mathematics is in rotary_embedding.h.
#include <limits>

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"
#include "rotary_embedding.h"

namespace apex::parallel {
inline namespace APEX_BACKEND_NS {
namespace {

// [batch, heads, sequence, channels] in memory of [sequence, batch, heads, channels], or with the
// batch first.
Tensor tokens_like(const Tensor& x, bool tokens_first) {
  const int64_t b = x.size(0), h = x.size(1), s = x.size(2), d = x.size(3);
  const int64_t heads = product({h, d});
  const int64_t token = tokens_first ? product({b, heads}) : heads;
  const int64_t batch = tokens_first ? heads : product({s, heads});
  return empty_strided(x, {b, h, s, d}, {batch, d, token, 1}, x.scalar_type());
}

// A table by its argument's name.
void check_table(const char* op, const NamedTensor& given, const NamedTensor& tokens) {
  check_tensor(op, given);
  const Tensor &table = *given.tensor, &x = *tokens.tensor;
  check(table.dim() == 2 && table.is_contiguous() && table.is_cpu() == x.is_cpu() &&
            table.get_device_index() == x.get_device_index() &&
            (table.scalar_type() == ScalarType::Float || table.scalar_type() == x.scalar_type()),
        op, ": ", given.name, " must be contiguous [rows, channels], float32 or the dtype of ",
        tokens.name, ", on its device; got ", describe(table), " for ", describe(x), ".");
}

// As of TableRow.
struct Places {
  const std::optional<Tensor>& positions;
  int64_t divisor, modulus;
};

TableRow table_row(const char* op, const Places& places, const NamedTensor& table,
                   const NamedTensor& tokens) {
  const Tensor& x = *tokens.tensor;
  const int64_t rows = table.tensor->size(0), sequence = x.size(2);
  if (!places.positions) {
    const int64_t last = sequence == 0 ? -1 : (sequence - 1) / places.divisor;
    check(std::min(last, places.modulus - 1) < rows, op, ": ", table.name, ": a table of ", rows,
          " rows has no angles for a sequence of ", sequence, ".");
    return {nullptr, places.divisor, places.modulus, rows};
  }
  check_like(op, {"positions", places.positions}, sequence, ScalarType::Long, tokens);
  const int64_t* positions = data<int64_t>(*places.positions, "positions");
#if defined(APEX_CPU)  // a GPU would have to be waited for
  for (int64_t i = 0; i < sequence; ++i) {
    check(positions[i] >= 0 && positions[i] < rows, op, ": positions: position ", positions[i],
          " of token ", i, " has no row in a table of ", rows, ".");
  }
#endif
  return {positions, 1, std::numeric_limits<int64_t>::max(), rows};
}

// Angles by their arguments' names.
struct Tables {
  NamedTensor cos, sin;
};

// Channels [begin, end), of which those behind the table's width are copied.
void rotate(const char* op, const NamedTensor& tokens, const Tables& tables, const Places& places,
            int64_t begin, int64_t end, bool tokens_first, bool inverse, Tensor& y) {
  const Tensor &x = *tokens.tensor, &cos = *tables.cos.tensor, &sin = *tables.sin.tensor;
  check_table(op, tables.cos, tokens);
  check_table(op, tables.sin, tokens);
  const int64_t width = cos.size(1);
  check(sin.size(0) == cos.size(0) && sin.size(1) == width && width % 2 == 0 &&
            sin.scalar_type() == cos.scalar_type() && begin + width <= end,
        op, ": ", tables.cos.name, " and ", tables.sin.name,
        " must be alike, with an even number of channels, at most ", end - begin, "; got ",
        describe(cos), " and ", describe(sin), ".");
  const TableRow table = table_row(op, places, tables.cos, tokens);
  if (x.numel() == 0) return;
  const int64_t rows = x.size(0) * x.size(2);
  Context context(x);
  auto run = [&]<class S, class C>() {
    const TokenStrides from{x.stride(0), x.stride(1), x.stride(2)};
    const TokenStrides to{y.stride(0), y.stride(1), y.stride(2)};
    RotaryEmbedding<S, C> program{data<S>(x, tokens.name),
                                  data<C>(cos, tables.cos.name),
                                  data<C>(sin, tables.sin.name),
                                  data<S>(y, "y"),
                                  from,
                                  to,
                                  {x.size(0), x.size(1), x.size(2)},
                                  tokens_first,
                                  table,
                                  begin,
                                  width,
                                  end,
                                  inverse};
    rowwise(context, rows, x.size(3) * x.size(1), program);
  };
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    if (cos.scalar_type() == x.scalar_type()) return run.template operator()<S, S>();
    run.template operator()<S, float>();
  });
}

// x, or a copy, with contiguous channels: gradients are often one number, expanded.
Tensor checked_tokens(const char* op, const NamedTensor& given) {
  check_tensor(op, given);
  const Tensor& x = *given.tensor;
  check(x.dim() == 4, op, ": ", given.name, " must be [batch, heads, sequence, channels], got ",
        describe(x), ".");
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : as_contiguous(x);
}

template <bool kInverse>
Tensor along_a_line(const Tensor& given, const Tensor& cos, const Tensor& sin,
                    const std::optional<Tensor>& positions, bool tokens_first) {
  const char* op = kInverse ? "rotary_embedding_backward" : "rotary_embedding_forward";
  const char* name = kInverse ? "dy" : "x";
  const Tensor x = checked_tokens(op, {name, given});
  Tensor y = tokens_like(x, tokens_first);
  const Places places{positions, 1, std::numeric_limits<int64_t>::max()};
  rotate(op, {name, x}, {{"cos", cos}, {"sin", sin}}, places, 0, x.size(3), tokens_first, kInverse,
         y);
  return y;
}

template <bool kInverse>
Tensor over_a_plane(const Tensor& given, const Tensor& cos_h, const Tensor& sin_h,
                    const Tensor& cos_w, const Tensor& sin_w, int64_t img_w) {
  const char* op = kInverse ? "rotary_embedding_2d_backward" : "rotary_embedding_2d_forward";
  const char* name = kInverse ? "dy" : "x";
  check_tensors(op, {{"cos_h", cos_h}, {"sin_h", sin_h}, {"cos_w", cos_w}, {"sin_w", sin_w}});
  const Tensor x = checked_tokens(op, {name, given});
  check(img_w > 0, op, ": img_w must be positive, got ", img_w, ".");
  check(cos_h.dim() == 2 && cos_w.dim() == 2 && cos_h.size(1) * 2 == x.size(3) &&
            cos_w.size(1) * 2 == x.size(3),
        op, ": cos_h and cos_w must be half as wide as ", name, "; got ", describe(cos_h), ", ",
        describe(cos_w), " and ", describe(x), ".");
  Tensor y = tokens_like(x, false);
  const std::optional<Tensor> none;
  const int64_t half = x.size(3) / 2;
  const Places row{none, img_w, std::numeric_limits<int64_t>::max()}, column{none, 1, img_w};
  rotate(op, {name, x}, {{"cos_h", cos_h}, {"sin_h", sin_h}}, row, 0, half, false, kInverse, y);
  rotate(op, {name, x}, {{"cos_w", cos_w}, {"sin_w", sin_w}}, column, half, 2 * half, false,
         kInverse, y);
  return y;
}

}  // namespace

APEX_KERNELS(apex_parallel, m) {
  m.impl("rotary_embedding_forward", TORCH_BOX(&along_a_line<false>));
  m.impl("rotary_embedding_backward", TORCH_BOX(&along_a_line<true>));
  m.impl("rotary_embedding_2d_forward", TORCH_BOX(&over_a_plane<false>));
  m.impl("rotary_embedding_2d_backward", TORCH_BOX(&over_a_plane<true>));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::parallel
