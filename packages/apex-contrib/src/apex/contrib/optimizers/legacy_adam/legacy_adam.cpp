// Registers scaled_adam_step, scaled_adam_undo and cast_unless: checks, types and launch; the
// mathematics is in legacy_adam.h and math/adam.h.
#include "legacy_adam.h"
#include "apex/engine/foreach.h"
#include "apex/torch/context.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"

namespace apex::legacy_adam {
inline namespace APEX_BACKEND_NS {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Numbers {
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t step;
  bool bias_correction, eps_inside_sqrt;
};

void check_numbers(const char* op, const Numbers& given) {
  check_step(op, given.step);
  check_betas(op, given.beta1, given.beta2);
  check_not_negative(op, "eps", given.eps);
}

LegacyHyper make_hyper(const char* op, const Numbers& given, const MaybeTensor& device_scale,
                       const MaybeTensor& overflow, const MaybeTensor& flag,
                       const char* name_of_flag, const Tensor& like) {
  StepNumbers numbers =
      make_step_numbers(given.lr, given.step, {given.beta1, given.beta2, given.bias_correction});
  return {given.lr * std::sqrt(numbers.correction2) / numbers.correction1,
          given.beta1,
          given.beta2,
          given.eps,
          given.weight_decay,
          given.grad_scale,
          given.eps_inside_sqrt,
          optional_number<float>(op, "device_scale", device_scale, like),
          overflow ? number_near<int>(op, "overflow", *overflow, like) : nullptr,
          optional_number<int>(op, name_of_flag, flag, like)};
}

// Raises unless the list is of a type that kernels convert as they load.
void check_storage(const char* op, const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  Storage storage = storage_of(dtype);
  check(storage != Storage::kOther && storage != Storage::kFloat8, op, ": ", list.name,
        " must be float32, float16 or bfloat16 (or all float64), got ", dtype_name(dtype), ".");
}

bool is_bytes(const TensorList& list) { return list[0].scalar_type() == ScalarType::Byte; }

bool are_doubles(const char* op, std::initializer_list<NamedList> lists) {
  size_t count = 0;
  for (const NamedList& list : lists) {
    count += list.tensors[0].scalar_type() == ScalarType::Double;
  }
  if (count == lists.size()) return true;
  for (const NamedList& list : lists) check_storage(op, list);
  return false;
}

using Value = InOut<AnyFloat>;
using Read = In<AnyFloat>;
using Wide = InOut<double>;

void scaled_adam_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, const TensorList& copies, double lr,
                      double beta1, double beta2, double eps, double weight_decay,
                      double grad_scale, const MaybeTensor& device_scale, int64_t step,
                      bool bias_correction, bool eps_inside_sqrt, const MaybeTensor& overflow,
                      const MaybeTensor& noop_flag) {
  const char* op = "scaled_adam_step";
  Numbers given{lr,   beta1,           beta2,          eps, weight_decay, grad_scale,
                step, bias_correction, eps_inside_sqrt};
  check_numbers(op, given);
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, c{"copies", copies};
  TensorTable table =
      copies.empty() ? make_table(op, {p, g, m, v}) : make_table(op, {p, g, m, v, c});
  if (params.empty()) return;
  LegacyHyper hyper =
      make_hyper(op, given, device_scale, overflow, noop_flag, "noop_flag", params[0]);
  Context context(params[0]);
  if (are_doubles(op, {p, g, m, v})) {
    check(copies.empty(), op, ": copies must be empty with float64 params.");
    foreach<Wide, In<double>, Wide, Wide>(context, table, ScaledAdamLaunch<double>{hyper});
    return;
  }
  ScaledAdamLaunch<float> launch{hyper};
  if (copies.empty()) {
    foreach<Value, Read, Value, Value>(context, table, launch);
  } else if (is_bytes(copies)) {
    foreach<Value, Read, Value, Value, Out<HighByte>>(context, table, launch);
  } else {
    check_storage(op, c);
    foreach<Value, Read, Value, Value, Out<AnyFloat>>(context, table, launch);
  }
}

void scaled_adam_undo(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, const Tensor& flag, double lr, double beta1,
                      double beta2, double eps, double weight_decay, double grad_scale,
                      int64_t step, bool bias_correction, bool eps_inside_sqrt) {
  const char* op = "scaled_adam_undo";
  Numbers given{lr,   beta1,           beta2,          eps, weight_decay, grad_scale,
                step, bias_correction, eps_inside_sqrt};
  check_numbers(op, given);
  check(beta1 > 0 && beta2 > 0, op,
        ": betas of 0 keep nothing of the step before, so that it "
        "cannot be undone; got ",
        beta1, " and ", beta2, ".");
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs};
  TensorTable table = make_table(op, {p, g, m, v});
  if (params.empty()) return;
  const MaybeTensor none;
  LegacyHyper hyper = make_hyper(op, given, none, none, flag, "flag", params[0]);
  check(hyper.rate * weight_decay != 1, op,
        ": weight_decay times the step's rate must not be 1, which cannot be undone; got ",
        weight_decay, " at a rate of ", hyper.rate, ".");
  Context context(params[0]);
  if (are_doubles(op, {p, g, m, v})) {
    foreach<Wide, In<double>, Wide, Wide>(context, table, AdamUndoLaunch<double>{hyper});
  } else {
    foreach<Value, Read, Value, Value>(context, table, AdamUndoLaunch<float>{hyper});
  }
}

void cast_unless(const TensorList& inputs, const TensorList& outputs, const Tensor& noop_flag) {
  const char* op = "cast_unless";
  NamedList x{"inputs", inputs, Use::kRead}, y{"outputs", outputs, Use::kWritten};
  TensorTable table = make_table(op, {x, y});
  if (inputs.empty()) return;
  if (!is_bytes(inputs)) check_storage(op, x);
  if (!is_bytes(outputs)) check_storage(op, y);
  CastUnless cast{number_near<int>(op, "noop_flag", noop_flag, inputs[0])};
  Context context(inputs[0]);
  if (is_bytes(inputs) && is_bytes(outputs)) {
    foreach<In<HighByte>, Out<HighByte>>(context, table, cast);
  } else if (is_bytes(inputs)) {
    foreach<In<HighByte>, Out<AnyFloat>>(context, table, cast);
  } else if (is_bytes(outputs)) {
    foreach<Read, Out<HighByte>>(context, table, cast);
  } else {
    foreach<Read, Out<AnyFloat>>(context, table, cast);
  }
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("cast_unless", TORCH_BOX(&cast_unless));
  m.impl("scaled_adam_step", TORCH_BOX(&scaled_adam_step));
  m.impl("scaled_adam_undo", TORCH_BOX(&scaled_adam_undo));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::legacy_adam
