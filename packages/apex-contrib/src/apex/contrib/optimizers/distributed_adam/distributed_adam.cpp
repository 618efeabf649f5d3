// Registers distributed_adam_step and distributed_adam_peaks: checks, types and launch; the
// mathematics is in shard_adam.h and math/adam.h.
#include "apex/engine/foreach.h"
#include "apex/engine/foreach_fold.h"
#include "apex/torch/context.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"
#include "shard_adam.h"

namespace apex::distributed_adam {
inline namespace APEX_BACKEND_NS {
namespace {

using MaybeTensor = std::optional<Tensor>;

// What a step and its forecast of peaks share.
struct Arguments {
  const TensorList &params, &grads, &exp_avgs, &exp_avg_sqs;
  DeviceNumbers device;
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  bool bias_correction, decoupled;
};

void check_numbers(const char* op, const Arguments& given) {
  if (!given.device.step) check_step(op, given.step);
  check_betas(op, given.beta1, given.beta2);
  check_not_negative(op, "eps", given.eps);
}

void check_storage(const char* op, const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  Storage storage = storage_of(dtype);
  check(storage != Storage::kOther && storage != Storage::kFloat8, op, ": ", list.name,
        " must be float32, float16 or bfloat16, got ", dtype_name(dtype), ".");
}

AdamHyper make_hyper(const char* op, const Arguments& given) {
  AdamHyper hyper{
      given.beta1,
      given.beta2,
      given.eps,
      given.weight_decay,
      given.decoupled,
      make_step_numbers(given.lr, given.step, {given.beta1, given.beta2, given.bias_correction})};
  set_device_numbers(op, hyper.numbers, given.device, given.params[0]);
  return hyper;
}

// Memory of scales, [fragments, 3]; null without them.
const float* scales_data(const char* op, const char* name, const MaybeTensor& scales,
                         const TensorList& lists) {
  if (!scales) return nullptr;
  check_tensors(op, {{name, *scales}});
  const Tensor like = lists[0];
  check(scales->numel() == 3 * static_cast<int64_t>(lists.size()) && scales->is_contiguous() &&
            scales->scalar_type() == ScalarType::Float && scales->is_cpu() == like.is_cpu() &&
            scales->get_device_index() == like.get_device_index(),
        op, ": ", name, " must be contiguous, three numbers per fragment (", 3 * lists.size(),
        "), float32, on the fragments' device, got ", describe(*scales), ".");
  return data<float>(*scales, name);
}

using Value = InOut<AnyFloat>;
using Read = In<AnyFloat>;

Tensor distributed_adam_peaks(const TensorList& params, const TensorList& grads,
                              const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                              const MaybeTensor& scales, const MaybeTensor& device_lr,
                              const MaybeTensor& device_step, const MaybeTensor& grad_scale,
                              double lr, double beta1, double beta2, double eps,
                              double weight_decay, int64_t step, bool bias_correction,
                              bool decoupled) {
  const char* op = "distributed_adam_peaks";
  const MaybeTensor never;
  Arguments given{params,
                  grads,
                  exp_avgs,
                  exp_avg_sqs,
                  {device_lr, device_step, grad_scale, never, "grad_scale"},
                  lr,
                  beta1,
                  beta2,
                  eps,
                  weight_decay,
                  step,
                  bias_correction,
                  decoupled};
  check(!params.empty(), op, ": params must hold at least one tensor, got none.");
  check_numbers(op, given);
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs};
  TensorTable table = make_table(op, {p, g, m, v}, Empty::kKeep);
  for (const NamedList& list : {p, g, m, v}) check_storage(op, list);
  ShardAdam<FragmentPeaks> functor{make_hyper(op, given), scales_data(op, "scales", scales, params),
                                   nullptr};
  Context context(params[0]);
  Tensor result = empty(params[0], {static_cast<int64_t>(params.size()), 3}, ScalarType::Double);
  foreach_fold<3, Read, Read, Read, Read>(context, table, functor, data<double>(result, "result"));
  return result;
}

void distributed_adam_step(const TensorList& params, const TensorList& grads,
                           const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                           const TensorList& remainders, const TensorList& copies,
                           const MaybeTensor& scales, const MaybeTensor& new_scales,
                           const MaybeTensor& device_lr, const MaybeTensor& device_step,
                           const MaybeTensor& grad_scale, const MaybeTensor& found_inf, double lr,
                           double beta1, double beta2, double eps, double weight_decay,
                           int64_t step, bool bias_correction, bool decoupled) {
  const char* op = "distributed_adam_step";
  Arguments given{params,
                  grads,
                  exp_avgs,
                  exp_avg_sqs,
                  {device_lr, device_step, grad_scale, found_inf, "grad_scale"},
                  lr,
                  beta1,
                  beta2,
                  eps,
                  weight_decay,
                  step,
                  bias_correction,
                  decoupled};
  check_numbers(op, given);
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, r{"remainders", remainders}, c{"copies", copies};
  const bool splits = !remainders.empty();
  check(!splits || (!scales && !new_scales), op,
        ": scales must be None with remainders, which are exact.");
  TensorTable table = splits           ? make_table(op, {p, g, m, v, r, c}, Empty::kKeep)
                      : copies.empty() ? make_table(op, {p, g, m, v}, Empty::kKeep)
                                       : make_table(op, {p, g, m, v, c}, Empty::kKeep);
  if (params.empty()) return;
  for (const NamedList& list : {p, g, m, v}) check_storage(op, list);
  if (!copies.empty()) check_storage(op, c);
  ShardAdam<FragmentStep> functor{make_hyper(op, given), scales_data(op, "scales", scales, params),
                                  scales_data(op, "new_scales", new_scales, params)};
  Context context(params[0]);
  if (splits) {
    bool fits = params[0].scalar_type() == ScalarType::BFloat16 &&
                copies[0].scalar_type() == ScalarType::BFloat16 &&
                remainders[0].scalar_type() == ScalarType::Short;
    check(fits, op, ": with remainders, params and copies must be bfloat16 and remainders int16, ",
          "got ", describe(params[0]), ", ", describe(copies[0]), " and remainders of ",
          dtype_name(remainders[0].scalar_type()), ".");
    foreach<InOut<BFloat16>, Read, Value, Value, InOut<int16_t>, Out<BFloat16>>(context, table,
                                                                                functor);
    return;
  }
  bool is_wide = functor.scales == nullptr && functor.new_scales == nullptr;
  for (const NamedList& list : {p, g, m, v}) {
    is_wide = is_wide && list.tensors[0].scalar_type() == ScalarType::Float;
  }
  using Wide = InOut<float>;
  if (is_wide && copies.empty()) {
    foreach<Wide, In<float>, Wide, Wide>(context, table, WideAdam{functor.hyper});
  } else if (is_wide) {
    foreach<Wide, In<float>, Wide, Wide, Out<AnyFloat>>(context, table,
                                                        WideAdamWithCopy{functor.hyper});
  } else if (copies.empty()) {
    foreach<Value, Read, Value, Value>(context, table, functor);
  } else {
    foreach<Value, Read, Value, Value, Out<AnyFloat>>(context, table, functor);
  }
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("distributed_adam_peaks", TORCH_BOX(&distributed_adam_peaks));
  m.impl("distributed_adam_step", TORCH_BOX(&distributed_adam_step));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::distributed_adam
