// Registers adam_step_compact and adam_compact_peaks: checks, types and launch; the mathematics is
// in compact.h and math/adam.h.
#include "apex/engine/foreach.h"
#include "apex/engine/foreach_fold.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/table_columns.h"
#include "apex/torch/tensor_table.h"
#include "compact.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

void check_storage(const char* op, const char* name, const TensorList& list) {
  ScalarType dtype = list[0].scalar_type();
  check(storage_of(dtype) != Storage::kOther, op, ": ", name,
        " must be float32, float16, bfloat16 or float8_e4m3fn, got ", dtype_name(dtype), ".");
}

// Memory of scales, [tensors, 3]; null without them.
const float* scales_data(const char* op, const char* name, const std::optional<Tensor>& scales,
                         const TensorList& lists) {
  if (!scales) return nullptr;
  check_tensors(op, {{name, *scales}});
  const Tensor like = lists[0];
  check(scales->numel() == 3 * static_cast<int64_t>(lists.size()) && scales->is_contiguous() &&
            scales->scalar_type() == ScalarType::Float && scales->is_cpu() == like.is_cpu() &&
            scales->get_device_index() == like.get_device_index(),
        op, ": ", name, " must be contiguous, three numbers per tensor (", 3 * lists.size(),
        "), float32, on the tensors' device, got ", describe(*scales), ".");
  return data<float>(*scales, name);
}

template <class Body>
void dispatch_params(const char* op, const TensorList& params, Body&& body) {
  ScalarType dtype = params[0].scalar_type();
  if (dtype == ScalarType::Float) return body.template operator()<float>();
  if (dtype == ScalarType::Half) return body.template operator()<Half>();
  if (dtype == ScalarType::BFloat16) return body.template operator()<BFloat16>();
  fail(op, ": params must be float32, float16 or bfloat16, got ", dtype_name(dtype), ".");
}

using Moment = InOut<AnyFloat>;

// The numbers of a step, as both operators take them.
struct Numbers {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  bool bias_correction, decoupled;
  double gradient_scale;

  AdamStep<float> checked_step(const char* op) const {
    check_step(op, step);
    check_betas(op, beta1, beta2);
    check_not_negative(op, "eps", eps);
    AdamHyper hyper{beta1,     beta2,
                    eps,       weight_decay,
                    decoupled, make_step_numbers(lr, step, {beta1, beta2, bias_correction})};
    return make_adam_step<float>(hyper, gradient_scale);
  }
};

bool are_half(const TensorList& masters) {
  return !masters.empty() && masters[0].scalar_type() == ScalarType::Half;
}

Tensor adam_compact_peaks(const TensorList& params, const TensorList& grads,
                          const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                          const TensorList& masters, const std::optional<Tensor>& scales, double lr,
                          double beta1, double beta2, double eps, double weight_decay, int64_t step,
                          bool bias_correction, bool decoupled, double gradient_scale) {
  const char* op = "adam_compact_peaks";
  check(!grads.empty(), op, ": grads must hold at least one tensor, got none.");
  const AdamStep<float> plain =
      Numbers{lr, beta1, beta2, eps, weight_decay, step, bias_correction, decoupled, gradient_scale}
          .checked_step(op);
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, w{"masters", masters};
  const bool has_half = are_half(masters), reads_params = !decoupled && weight_decay != 0;
  // All lists are checked, as by the step that follows, though one of params and masters is read.
  const TensorTable table = masters.empty() ? make_table(op, {p, g, m, v}, Empty::kKeep)
                                            : make_table(op, {p, g, m, v, w}, Empty::kKeep);
  for (const NamedList& list : {g, m, v}) check_storage(op, list.name, list.tensors);
  const float* read = scales_data(op, "scales", scales, grads);
  Context context(grads[0]);
  Tensor result =
      empty(grads[0], {static_cast<int64_t>(grads.size()), has_half ? 3 : 2}, ScalarType::Double);
  double* numbers = data<double>(result, "result");
  using Read = In<AnyFloat>;
  if (has_half) {
    WithScales<MasterPeaks> functor{{plain, {}}, read, nullptr};
    foreach_fold<3, Read, Read, Read, In<Half>>(context, columns_of(table, {1, 2, 3, 4}), functor,
                                                numbers);
    return result;
  }
  const AdamUpdate<float>& update = plain.update;
  MomentPeaks peaks{update.moments, update.l2_decay, update.gradient_factor, {}};
  WithScales<MomentPeaks> functor{peaks, read, nullptr};
  if (!reads_params) {
    foreach_fold<2, Read, Read, Read>(context, columns_of(table, {1, 2, 3}), functor, numbers);
  } else {
    dispatch_params(op, params, [&]<class P>() {
      foreach_fold<2, In<P>, Read, Read, Read>(context, columns_of(table, {0, 1, 2, 3}), functor,
                                               numbers);
    });
  }
  return result;
}

void adam_step_compact(const TensorList& params, const TensorList& grads,
                       const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                       const TensorList& masters, const std::optional<Tensor>& scales,
                       const std::optional<Tensor>& new_scales, double lr, double beta1,
                       double beta2, double eps, double weight_decay, int64_t step,
                       bool bias_correction, bool decoupled, double gradient_scale) {
  const char* op = "adam_step_compact";
  const CompactStep plain{
      Numbers{lr, beta1, beta2, eps, weight_decay, step, bias_correction, decoupled, gradient_scale}
          .checked_step(op),
      {},
      {}};
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, w{"masters", masters};
  TensorTable table = masters.empty() ? make_table(op, {p, g, m, v}, Empty::kKeep)
                                      : make_table(op, {p, g, m, v, w}, Empty::kKeep);
  if (params.empty()) return;
  for (const NamedList& list : {g, m, v}) check_storage(op, list.name, list.tensors);
  const float* read = scales_data(op, "scales", scales, params);
  const float* write = scales_data(op, "new_scales", new_scales, params);
  Context context(params[0]);
  using G = In<AnyFloat>;
  dispatch_params(op, params, [&]<class P>() {
    if (masters.empty()) {
      WithScales<CompactStep> functor{plain, read, write};
      foreach<InOut<P>, G, Moment, Moment>(context, table, functor);
      return;
    }
    if (are_half(masters)) {
      if constexpr (!std::is_same_v<P, float>) {
        WithScales<WithHalfMaster> functor{{plain}, read, write};
        foreach<Out<P>, G, Moment, Moment, InOut<Half>>(context, table, functor);
        return;
      }
    }
    ScalarType master = masters[0].scalar_type();
    if (master == ScalarType::Float) {
      WithScales<WithMaster<CompactStep>> functor{{plain}, read, write};
      foreach<Out<P>, G, Moment, Moment, InOut<float>>(context, table, functor);
      return;
    }
    if constexpr (std::is_same_v<P, BFloat16>) {
      if (master == ScalarType::Short) {
        WithScales<WithRemainder> functor{{plain}, read, write};
        foreach<InOut<P>, G, Moment, Moment, InOut<int16_t>>(context, table, functor);
        return;
      }
    }
    fail(op, ": masters must be float32, or float16 for params of 16 bits, or int16 remainders of ",
         "bfloat16 params, got ", dtype_name(master), " with params ",
         dtype_name(params[0].scalar_type()), ".");
  });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("adam_compact_peaks", TORCH_BOX(&adam_compact_peaks));
  m.impl("adam_step_compact", TORCH_BOX(&adam_step_compact));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
