// Registers lamb_step, lamb_terms and lamb_apply: checks, types and launches; the mathematics is in
// math/lamb.h and tables.h.
#include "apex/engine/foreach.h"
#include "apex/engine/foreach_fold.h"
#include "apex/torch/context.h"
#include "apex/torch/hyper_parameters.h"
#include "apex/torch/lamb_passes.h"
#include "apex/torch/library.h"
#include "apex/torch/step_numbers.h"
#include "tables.h"

namespace apex::sharded_lamb {
inline namespace APEX_BACKEND_NS {
namespace {

using MaybeTensor = std::optional<Tensor>;
using Value = InOut<AnyFloat>;
using Read = In<AnyFloat>;
using Wide = InOut<float>;

void check_storage(const char* op, const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  Storage storage = storage_of(dtype);
  check(storage != Storage::kOther && storage != Storage::kFloat8, op, ": ", list.name,
        " must be float32, float16 or bfloat16 (lamb_step also takes lists that are all float64), ",
        "got ", dtype_name(dtype), ".");
}

bool has_dtype(const TensorList& list, ScalarType dtype) { return list[0].scalar_type() == dtype; }

void check_float(const char* op, const NamedList& list) {
  check(has_dtype(list.tensors, ScalarType::Float), op, ": ", list.name, " must be float32, got ",
        describe(list.tensors[0]), ".");
}

void check_copies(const char* op, const NamedList& list) {
  ScalarType dtype = list.tensors[0].scalar_type();
  Storage storage = storage_of(dtype);
  bool is_float = storage != Storage::kOther && storage != Storage::kFloat8;
  check(is_float || dtype == ScalarType::Byte, op, ": ", list.name,
        " must be float32, float16, bfloat16, or uint8 for the upper bytes of float16, got ",
        dtype_name(dtype), ".");
}

// Writes the new parameters as bytes or as floats; check_copies() has been called.
template <class... Columns, class Functor>
void foreach_copied(const Context& context, const TensorTable& table, const Functor& functor,
                    const NamedList& copies) {
  if (has_dtype(copies.tensors, ScalarType::Byte)) {
    foreach<Out<HighByte>, Columns...>(context, table, functor);
  } else {
    foreach<Out<AnyFloat>, Columns...>(context, table, functor);
  }
}

// All columns are P; the moments are computed and stored in the same type.
template <class P, class G, class M>
void run_plain(const Context& context, const TensorTable& table, const LambHyper& hyper,
               const Passes& passes, double* squares) {
  using T = compute_t<P>;
  if (passes.first) {
    foreach_fold<2, In<P>, In<G>, InOut<M>, InOut<M>>(context, columns_of(table, {0, 1, 2, 3}),
                                                      LambFirstPass<T>{hyper}, squares);
  }
  if (!passes.second) return;
  LambSecondPass<T, false, Results::kStore> second{hyper, squares};
  foreach<InOut<P>, In<M>, In<M>>(context, columns_of(table, {0, 2, 3}), second);
}

void run_copied(const Context& context, const TensorTable& table, const LambHyper& hyper,
                const Passes& passes, double* squares, const NamedList& copies) {
  if (passes.first) {
    foreach_fold<2, Read, Read, Wide, Wide>(context, columns_of(table, {0, 1, 2, 3}),
                                            LambFirstPass<float>{hyper}, squares);
  }
  if (!passes.second) return;
  LambSecondPass<float, false, Results::kCopy> second{hyper, squares};
  foreach_copied<Value, In<float>, In<float>>(context, columns_of(table, {4, 0, 2, 3}), second,
                                              copies);
}

// Moments in 16 bits: the second pass, which sees the gradient again, stores them.
void run_narrow(const Context& context, const TensorTable& table, const LambHyper& hyper,
                const Passes& passes, double* squares) {
  if (passes.first) {
    foreach_fold<2, Read, Read, Read, Read>(context, table, LambFirstPass<float>{hyper}, squares);
  }
  if (!passes.second) return;
  LambSecondPass<float, true, Results::kStore> second{hyper, squares};
  foreach<Value, Read, Value, Value>(context, table, second);
}

void set_grad_norm(const char* op, LambHyper& hyper, const MaybeTensor& norm, const Tensor& like) {
  if (norm) hyper.global_grad_norm_wide = number_near<double>(op, "global_grad_norm", *norm, like);
}

void lamb_step(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& copies, double lr,
               const MaybeTensor& device_lr, double beta1, double beta2, double eps,
               double weight_decay, int64_t step, const MaybeTensor& device_step,
               bool bias_correction, bool grad_averaging, bool decoupled, bool use_nvlamb,
               const MaybeTensor& global_grad_norm, double max_grad_norm,
               const MaybeTensor& inv_scale, const MaybeTensor& found_inf,
               const MaybeTensor& squares, int64_t only_pass) {
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
  const Tensor& like = params[0];
  LambHyper hyper{{beta1, beta2, eps, weight_decay, decoupled,
                   make_step_numbers(lr, step, {beta1, beta2, bias_correction}), grad_averaging},
                  use_nvlamb};
  set_device_numbers(op, hyper.numbers, {device_lr, device_step, inv_scale, found_inf}, like);
  hyper.max_grad_norm = max_grad_norm;
  set_grad_norm(op, hyper, global_grad_norm, like);
  Context context(like);
  double* sums = passes.squares;
  if (sums == nullptr) {
    sums = static_cast<double*>(context.workspace(table.tensors() * 2 * sizeof(double)));
  }
  auto are_all = [&](ScalarType dtype, std::initializer_list<NamedList> lists) {
    return std::all_of(lists.begin(), lists.end(),
                       [&](const NamedList& list) { return has_dtype(list.tensors, dtype); });
  };
  if (are_all(ScalarType::Double, {p, g, m, v})) {
    check(copies.empty(), op, ": copies must be empty with float64 params.");
    return run_plain<double, double, double>(context, table, hyper, passes, sums);
  }
  for (const NamedList& list : {p, g, m, v}) check_storage(op, list);
  bool is_narrow = !are_all(ScalarType::Float, {m, v});
  check(copies.empty() || !is_narrow, op,
        ": with copies, exp_avgs and exp_avg_sqs must be float32, got ",
        dtype_name(exp_avgs[0].scalar_type()), " and ", dtype_name(exp_avg_sqs[0].scalar_type()),
        ".");
  if (is_narrow) return run_narrow(context, table, hyper, passes, sums);
  if (!copies.empty()) {
    check_copies(op, c);  // before the first pass, which writes the moments
    return run_copied(context, table, hyper, passes, sums, c);
  }
  run_plain<AnyFloat, AnyFloat, float>(context, table, hyper, passes, sums);
}

// Memory of numbers per tensor, `width` for each.
const double* numbers_near(const char* op, const char* name, const Tensor& numbers, int width,
                           const TensorList& lists) {
  check_tensors(op, {{name, numbers}});
  const Tensor& like = lists[0];
  bool is_near =
      numbers.is_cpu() == like.is_cpu() && numbers.get_device_index() == like.get_device_index();
  int64_t count = width * static_cast<int64_t>(lists.size());
  check(is_near && numbers.is_contiguous() && numbers.numel() == count &&
            numbers.scalar_type() == ScalarType::Double,
        op, ": ", name, " must be contiguous, ", count,
        " float64 numbers on the device of the tensors (", describe(like), "), got ",
        describe(numbers), ".");
  return data<double>(numbers, name);
}

void lamb_terms(const TensorList& grads, const TensorList& params, const TensorList& exp_avgs,
                const TensorList& exp_avg_sqs, const TensorList& updates, const Tensor& numbers,
                const Tensor& gradient_factor, bool decoupled, const Tensor& noop_flag) {
  const char* op = "lamb_terms";
  NamedList g{"grads", grads, Use::kRead}, p{"params", params, Use::kRead},
      m{"exp_avgs", exp_avgs, Use::kWritten}, v{"exp_avg_sqs", exp_avg_sqs, Use::kWritten},
      u{"updates", updates, Use::kWritten};
  TensorTable table = make_table(op, {g, p, m, v, u}, Empty::kKeep);  // row i has numbers i
  if (params.empty()) return;
  for (const NamedList& list : {g, p}) check_storage(op, list);
  for (const NamedList& list : {m, v, u}) check_float(op, list);
  const Tensor& like = params[0];
  LambTerms terms{numbers_near(op, "numbers", numbers, kNumbers, params),
                  number_near<double>(op, "gradient_factor", gradient_factor, like),
                  number_near<int>(op, "noop_flag", noop_flag, like), decoupled};
  Context context(like);
  foreach<Read, Read, Wide, Wide, Out<float>>(context, table, terms);
}

void lamb_apply(const TensorList& params, const TensorList& updates, const TensorList& copies,
                const Tensor& param_norms, const Tensor& update_norms, const Tensor& decays,
                const Tensor& lr, bool use_nvlamb, const Tensor& noop_flag) {
  const char* op = "lamb_apply";
  NamedList p{"params", params, Use::kWritten}, u{"updates", updates, Use::kRead},
      c{"copies", copies, Use::kWritten};
  TensorTable table = make_table(op, {c, p, u}, Empty::kKeep);
  if (params.empty()) return;
  for (const NamedList& list : {p, u}) check_float(op, list);
  check_copies(op, c);
  const Tensor& like = params[0];
  LambRates rates{number_near<float>(op, "lr", lr, like),
                  numbers_near(op, "param_norms", param_norms, 1, params),
                  numbers_near(op, "update_norms", update_norms, 1, params),
                  numbers_near(op, "decays", decays, 1, params),
                  number_near<int>(op, "noop_flag", noop_flag, like),
                  use_nvlamb};
  Context context(like);
  foreach_copied<Wide, In<float>>(context, table, rates, c);
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("lamb_apply", TORCH_BOX(&lamb_apply));
  m.impl("lamb_step", TORCH_BOX(&lamb_step));
  m.impl("lamb_terms", TORCH_BOX(&lamb_terms));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::sharded_lamb
