// Registers update_scale_hysteresis: checks and launch; the mathematics is in hysteresis.h.
#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "hysteresis.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

void update_scale_hysteresis(const Tensor& current_scale, const Tensor& growth_tracker,
                             const Tensor& hysteresis_tracker, const Tensor& found_inf,
                             double growth_factor, double backoff_factor, int64_t growth_interval,
                             int64_t hysteresis) {
  const char* op = "update_scale_hysteresis";
  check(growth_factor > 0, op, ": growth_factor must be > 0, got ", growth_factor, ".");
  check(backoff_factor > 0, op, ": backoff_factor must be > 0, got ", backoff_factor, ".");
  check(growth_interval >= 1, op, ": growth_interval must be >= 1, got ", growth_interval, ".");
  check(hysteresis >= 0, op, ": hysteresis must be >= 0, got ", hysteresis, ".");
  check_tensors(op, {{"current_scale", current_scale}});
  TensorTable table;
  table.columns = 4;
  table.numel = {1};
  table.data = {number_near<float>(op, "current_scale", current_scale, current_scale),
                number_near<int>(op, "growth_tracker", growth_tracker, current_scale),
                number_near<int>(op, "hysteresis_tracker", hysteresis_tracker, current_scale),
                number_near<float>(op, "found_inf", found_inf, current_scale)};
  HysteresisStep step{growth_factor, backoff_factor, static_cast<double>(growth_interval),
                      static_cast<double>(hysteresis)};
  Context context(current_scale);
  foreach<InOut<float>, InOut<int>, InOut<int>, In<float>>(context, table, step);
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("update_scale_hysteresis", TORCH_BOX(&update_scale_hysteresis));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
