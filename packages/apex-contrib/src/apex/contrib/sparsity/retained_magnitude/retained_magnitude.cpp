// Registers retained_magnitude: checks, types and launch; the mathematics is in the header.
#include "retained_magnitude.h"

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

Tensor retained_magnitude(const Tensor& magnitudes, const Tensor& fours) {
  const char* op = "retained_magnitude";
  check_tensors(op, {{"magnitudes", magnitudes}, {"fours", fours}});
  check(magnitudes.dim() == 2 && magnitudes.is_contiguous(), op,
        ": magnitudes must be contiguous [channels, rows], got ", describe(magnitudes), ".");
  check(fours.dim() == 2 && fours.size(1) == 4, op, ": fours must be [N, 4], got ", describe(fours),
        ".");
  check_sizes(op, {"fours", fours}, fours.sizes(), ScalarType::Long, {"magnitudes", magnitudes});
  const int64_t channels = magnitudes.size(0), sets = fours.size(0);
  const int64_t* picked = data<int64_t>(fours, "fours");
#if defined(APEX_CPU)
  for (int64_t i = 0; i < 4 * sets; ++i) {
    if (picked[i] >= 0 && picked[i] < channels) continue;
    fail(op, ": fours[", i / 4, ", ", i % 4, "] is ", picked[i], ", expected a channel, 0 to ",
         channels - 1, ".");
  }
#else
  check(channels > 0 || sets == 0, op, ": there are no channels: ", describe(magnitudes), ".");
#endif
  const bool is_double = magnitudes.scalar_type() == ScalarType::Double;
  Tensor retained = empty(magnitudes, {sets}, is_double ? ScalarType::Double : ScalarType::Float);
  Context context(magnitudes);
  dispatch_floating(op, magnitudes.scalar_type(), [&]<class S>() {
    using T = compute_t<S>;
    rowwise(context, sets, magnitudes.size(1),
            RetainedMagnitude<S>{data<S>(magnitudes, "magnitudes"), picked, channels,
                                 data<T>(retained, "retained")});
  });
  return retained;
}

}  // namespace

APEX_KERNELS(apex_contrib, m) { m.impl("retained_magnitude", TORCH_BOX(&retained_magnitude)); }

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
