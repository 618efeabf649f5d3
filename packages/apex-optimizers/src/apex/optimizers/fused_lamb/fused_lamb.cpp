// Registers lamb_step, lamb_stage1 and lamb_stage2: checks, types and launches; the mathematics is
// in math/lamb.h and stages.h.
#include <utility>

#include "apex/engine/foreach.h"
#include "apex/engine/foreach_fold.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/lamb_passes.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "apex/torch/tensor_table.h"
#include "stages.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

using OptionalTensor = std::optional<Tensor>;

void set_grad_norm(const char* op, LambHyper& hyper, const OptionalTensor& norm,
                   const Tensor& like) {
  if (!norm) return;
  check_tensors(op, {{"global_grad_norm", *norm}});
  if (norm->scalar_type() == ScalarType::Double) {
    hyper.global_grad_norm_wide = number_near<double>(op, "global_grad_norm", *norm, like);
  } else {
    hyper.global_grad_norm = number_near<float>(op, "global_grad_norm", *norm, like);
  }
}

// Calls body<P, M>() for the dtypes of parameters and moments.
template <class Body>
void dispatch_moments(const char* op, ScalarType param, ScalarType moment, Body&& body) {
  dispatch_floating(op, param, [&]<class P>() {
    if (moment == param) return body.template operator()<P, P>();
    if (moment == ScalarType::Float) return body.template operator()<P, float>();
    fail(op, ": exp_avgs and exp_avg_sqs must be float32 or of the params' dtype, ",
         dtype_name(param), "; got ", dtype_name(moment), ".");
  });
}

void check_moments(const char* op, const TensorList& exp_avgs, const TensorList& exp_avg_sqs) {
  check(exp_avg_sqs[0].scalar_type() == exp_avgs[0].scalar_type(), op, ": exp_avgs are ",
        dtype_name(exp_avgs[0].scalar_type()), ", but exp_avg_sqs are ",
        dtype_name(exp_avg_sqs[0].scalar_type()), ".");
}

void check_grads(const char* op, ScalarType param, ScalarType grad) {
  check(grad == param, op, ": params are ", dtype_name(param), ", but grads are ", dtype_name(grad),
        ". Gradients must have their parameter's dtype.");
}

// Calls body<G, C>() for float32 parameters and moments with 16-bit copies.
template <class Body>
void dispatch_copies(const char* op, ScalarType param, ScalarType grad, ScalarType moment,
                     ScalarType copy, Body&& body) {
  check(param == ScalarType::Float && moment == param && (grad == param || grad == copy), op,
        ": with copies, params, exp_avgs and exp_avg_sqs must be float32, and grads float32 or of "
        "the copies' dtype, got params ",
        dtype_name(param), ", grads ", dtype_name(grad), ", exp_avgs and exp_avg_sqs ",
        dtype_name(moment), ", copies ", dtype_name(copy), ".");
  auto with_copy = [&]<class C>() {
    grad == param ? body.template operator()<float, C>() : body.template operator()<C, C>();
  };
  if (copy == ScalarType::Half) return with_copy.template operator()<Half>();
  if (copy == ScalarType::BFloat16) return with_copy.template operator()<BFloat16>();
  fail(op, ": copies must be float16 or bfloat16, got ", dtype_name(copy), ".");
}

// C is the dtype of the copies, void without.
template <class P, class G, class M, class C>
void run_lamb(const Context& context, const TensorTable& table, const LambHyper& hyper,
              const Passes& passes) {
  using T = compute_t<P>;
  constexpr bool kCopy = !std::is_void_v<C>;
  if (table.tensors() == 0) return;
  double* squares = passes.squares;
  if (squares == nullptr) {
    squares = static_cast<double*>(context.workspace(table.tensors() * 2 * sizeof(double)));
  }
  TensorTable all = columns_of(table, {0, 1, 2, 3});
  LambFirstPass<T> first{hyper};
  if constexpr (!std::is_same_v<M, T>) {
    static_assert(!kCopy);
    if (passes.first) {
      foreach_fold<2, In<P>, In<G>, In<M>, In<M>>(context, all, first, squares);
    }
    if (!passes.second) return;
    LambSecondPass<T, true, Results::kStore> second{hyper, squares};
    foreach<InOut<P>, In<G>, InOut<M>, InOut<M>>(context, all, second);
  } else {
    if (passes.first) {
      foreach_fold<2, In<P>, In<G>, InOut<M>, InOut<M>>(context, all, first, squares);
    }
    if (!passes.second) return;
    if constexpr (std::is_same_v<P, BFloat16>) {
      if (passes.rounds_stochastically) {
        LambSecondPass<T, false, Results::kStochasticRounding> second{hyper, squares};
        return foreach<InOut<CutBFloat16>, In<M>, In<M>>(context, columns_of(table, {0, 2, 3}),
                                                         second);
      }
    }
    LambSecondPass<T, false, kCopy ? Results::kCopy : Results::kStore> second{hyper, squares};
    if constexpr (kCopy) {
      foreach<Out<C>, InOut<P>, In<M>, In<M>>(context, columns_of(table, {4, 0, 2, 3}), second);
    } else {
      foreach<InOut<P>, In<M>, In<M>>(context, columns_of(table, {0, 2, 3}), second);
    }
  }
}

void lamb_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& copies, double lr,
               const OptionalTensor& device_lr, double beta1, double beta2, double eps,
               double weight_decay, int64_t step, const OptionalTensor& device_step,
               bool bias_correction, bool grad_averaging, bool decoupled, bool use_nvlamb,
               bool maximize, const OptionalTensor& global_grad_norm, double max_grad_norm,
               const OptionalTensor& device_max_grad_norm, const OptionalTensor& inv_scale,
               const OptionalTensor& found_inf, std::optional<int64_t> rounding_key,
               const OptionalTensor& squares, int64_t only_pass) {
  const char* op = "lamb_step";
  if (!device_step) check_step(op, step);
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
      v{"exp_avg_sqs", exp_avg_sqs}, c{"copies", copies};
  // Tensors without elements keep their rows: squares belong to indices of the lists.
  TensorTable table = copies.empty() ? make_table(op, {p, g, m, v}, Empty::kKeep)
                                     : make_table(op, {p, g, m, v, c}, Empty::kKeep);
  if (params.empty()) return;
  Passes passes = chosen_passes(op, squares, only_pass, params);
  check_moments(op, exp_avgs, exp_avg_sqs);
  const Tensor& like = params[0];
  passes.rounds_stochastically = rounding_key.has_value();
  check(!rounding_key || (copies.empty() && like.scalar_type() == ScalarType::BFloat16 &&
                          exp_avgs[0].scalar_type() == ScalarType::Float),
        op,
        ": rounding_key must be None, unless params are bfloat16, without copies, with float32 "
        "exp_avgs and exp_avg_sqs; got params ",
        dtype_name(like.scalar_type()), ", exp_avgs ", dtype_name(exp_avgs[0].scalar_type()),
        " and ", copies.size(), " copies.");
  LambHyper hyper{{beta1, beta2, eps, weight_decay, decoupled,
                   make_step_numbers(lr, step, {beta1, beta2, bias_correction}), grad_averaging},
                  use_nvlamb,
                  maximize};
  set_device_numbers(op, hyper.numbers, {device_lr, device_step, inv_scale, found_inf}, like);
  hyper.rounding = {static_cast<uint64_t>(rounding_key.value_or(0)), static_cast<uint32_t>(step)};
  hyper.max_grad_norm = max_grad_norm;
  hyper.device_max_grad_norm =
      optional_number<float>(op, "device_max_grad_norm", device_max_grad_norm, like);
  set_grad_norm(op, hyper, global_grad_norm, like);
  ScalarType dtype = like.scalar_type(), grad = grads[0].scalar_type();
  ScalarType moment = exp_avgs[0].scalar_type();
  Context context(like);
  if (copies.empty()) {
    check_grads(op, dtype, grad);
    dispatch_moments(op, dtype, moment, [&]<class P, class M>() {
      run_lamb<P, P, M, void>(context, table, hyper, passes);
    });
    return;
  }
  dispatch_copies(op, dtype, grad, moment, copies[0].scalar_type(), [&]<class G, class C>() {
    run_lamb<float, G, float, C>(context, table, hyper, passes);
  });
}

// Memory of a tensor with one number of type S per tensor of a list.
template <class S>
const S* numbers_near(const char* op, const char* name, const Tensor& numbers, size_t count,
                      const Tensor& like) {
  check_tensors(op, {{name, numbers}});
  bool is_near =
      numbers.is_cpu() == like.is_cpu() && numbers.get_device_index() == like.get_device_index();
  check(is_near && numbers.is_contiguous() && static_cast<size_t>(numbers.numel()) == count &&
            numbers.scalar_type() == scalar_type_of<S>(),
        op, ": ", name, " must hold ", count, " ", dtype_name(scalar_type_of<S>()),
        " numbers, one per tensor, on the device of the tensors (", describe(like), "), got ",
        describe(numbers), ".");
  return data<S>(numbers, name);
}

// Raises if numbers that a kernel reads for every tensor lie in memory of a list that it writes.
void check_apart(const char* op, const char* name, const Tensor& numbers, const TensorTable& table,
                 int column, const TensorList& written) {
  auto bytes = [](const void* data, int64_t count) {
    auto begin = reinterpret_cast<uintptr_t>(data);
    return std::pair{begin, begin + static_cast<uintptr_t>(count)};
  };
  auto [begin, end] = bytes(memory_of(numbers, name), numbers.numel() * numbers.element_size());
  int64_t itemsize = written[0].element_size();
  for (int64_t row = 0; row < table.tensors(); ++row) {
    auto [from, to] = bytes(table.row(row)[column], table.numel[row] * itemsize);
    check(from >= end || begin >= to, op, ": ", name, " (", describe(numbers),
          ") shares memory with tensor ", row,
          " of a list that is written. Results would depend on the order of writing; use memory "
          "of its own.");
  }
}

void lamb_stage1(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                 const TensorList& exp_avg_sqs, const TensorList& updates,
                 const Tensor& per_tensor_decay, double beta1, double beta2, double eps,
                 int64_t step, const Tensor& global_grad_norm, double max_grad_norm) {
  const char* op = "lamb_stage1";
  check_step(op, step);
  check_betas(op, beta1, beta2);
  check_not_negative(op, "eps", eps);
  // Rows of tensors without elements stay: row i has decay i.
  TensorTable table = make_table(op,
                                 {{"grads", grads, Use::kRead},
                                  {"params", params, Use::kRead},
                                  {"exp_avgs", exp_avgs, Use::kWritten},
                                  {"exp_avg_sqs", exp_avg_sqs, Use::kWritten},
                                  {"updates", updates, Use::kWritten}},
                                 Empty::kKeep);
  if (params.empty()) return;
  check_moments(op, exp_avgs, exp_avg_sqs);
  const Tensor& like = params[0];
  check_grads(op, like.scalar_type(), grads[0].scalar_type());
  LambHyper hyper{{beta1, beta2, eps, 0.0, true, make_step_numbers(0, step, {beta1, beta2, true})}};
  set_grad_norm(op, hyper, global_grad_norm, like);
  hyper.max_grad_norm = max_grad_norm;
  const float* decays =
      numbers_near<float>(op, "per_tensor_decay", per_tensor_decay, params.size(), like);
  int column = 2;  // of the first list that is written
  for (const TensorList* written : {&exp_avgs, &exp_avg_sqs, &updates}) {
    check_apart(op, "per_tensor_decay", per_tensor_decay, table, column, *written);
    check_apart(op, "global_grad_norm", global_grad_norm, table, column++, *written);
  }
  ScalarType update = updates[0].scalar_type();
  Context context(like);
  dispatch_moments(op, like.scalar_type(), exp_avgs[0].scalar_type(), [&]<class P, class M>() {
    StageOne<compute_t<P>> stage{hyper, decays};
    if (update == scalar_type_of<P>()) {
      return foreach<In<P>, In<P>, InOut<M>, InOut<M>, Out<P>>(context, table, stage);
    }
    check(update == ScalarType::Float, op,
          ": updates must be float32 or of the params' dtype, got ", dtype_name(update), ".");
    foreach<In<P>, In<P>, InOut<M>, InOut<M>, Out<float>>(context, table, stage);
  });
}

void lamb_stage2(const TensorList& params, const TensorList& updates, const Tensor& param_norms,
                 const Tensor& update_norms, double lr, double weight_decay, bool use_nvlamb) {
  const char* op = "lamb_stage2";
  TensorTable table = make_table(
      op, {{"params", params, Use::kWritten}, {"updates", updates, Use::kRead}}, Empty::kKeep);
  if (params.empty()) return;
  const Tensor& like = params[0];
  ScalarType update = updates[0].scalar_type();
  auto* of_params = numbers_near<double>(op, "param_norms", param_norms, params.size(), like);
  auto* of_updates = numbers_near<double>(op, "update_norms", update_norms, params.size(), like);
  check_apart(op, "param_norms", param_norms, table, 0, params);
  check_apart(op, "update_norms", update_norms, table, 0, params);
  Context context(like);
  dispatch_floating(op, like.scalar_type(), [&]<class P>() {
    StageTwo<compute_t<P>> stage{lr, use_nvlamb || weight_decay != 0, of_params, of_updates};
    if (update == scalar_type_of<P>()) {
      return foreach<InOut<P>, In<P>>(context, table, stage);
    }
    check(update == ScalarType::Float, op,
          ": updates must be float32 or of the params' dtype, got ", dtype_name(update), ".");
    foreach<InOut<P>, In<float>>(context, table, stage);
  });
}

}  // namespace

APEX_KERNELS(apex_optimizers, m) {
  m.impl("lamb_step", TORCH_BOX(&lamb_step));
  m.impl("lamb_stage1", TORCH_BOX(&lamb_stage1));
  m.impl("lamb_stage2", TORCH_BOX(&lamb_stage2));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
