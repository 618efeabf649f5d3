// What the operators of Adam share: their lists, the dtypes of these, and the launch.
#pragma once

#include "apex/engine/foreach.h"
#include "apex/math/adam.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/tensor_table.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {

// One call of a step operator. Of the lists, `largest` (AMSGrad's maxima) and `masters` may be
// empty.
struct AdamCall {
  const char* op;
  const TensorList &params, &grads, &exp_avgs, &exp_avg_sqs, &largest, &masters;
  double sign;  // -1 to maximize
  bool rounds;  // parameters by chance
  AdamHyper hyper{};

  TensorTable table() const {
    NamedList p{"params", params}, g{"grads", grads}, m{"exp_avgs", exp_avgs},
        v{"exp_avg_sqs", exp_avg_sqs}, w{"masters", masters}, x{"max_exp_avg_sqs", largest};
    if (largest.empty()) {
      return masters.empty() ? make_table(op, {p, g, m, v}) : make_table(op, {p, g, m, v, w});
    }
    return masters.empty() ? make_table(op, {p, g, m, v, x}) : make_table(op, {p, g, m, v, w, x});
  }

  void check_dtypes() const {
    ScalarType moment = exp_avgs[0].scalar_type(), param = params[0].scalar_type();
    check(exp_avg_sqs[0].scalar_type() == moment, op, ": exp_avgs are ", dtype_name(moment),
          ", but exp_avg_sqs are ", dtype_name(exp_avg_sqs[0].scalar_type()), ".");
    check(largest.empty() || largest[0].scalar_type() == moment, op, ": exp_avgs are ",
          dtype_name(moment), ", but max_exp_avg_sqs are ",
          largest.empty() ? "" : dtype_name(largest[0].scalar_type()), ".");
    check(grads[0].scalar_type() == param, op, ": params are ", dtype_name(param),
          ", but grads are ", dtype_name(grads[0].scalar_type()),
          ". Gradients must have their parameter's dtype.");
    check(masters.empty() || masters[0].scalar_type() == ScalarType::Float, op,
          ": masters must be float32, got ",
          masters.empty() ? "" : dtype_name(masters[0].scalar_type()), ".");
    check(!rounds || masters.empty(), op,
          ": rounding_key rounds params without masters by chance, but there are some.");
    check(!rounds || param == ScalarType::BFloat16, op,
          ": only bfloat16 params are rounded by chance.");
  }

  // Calls body<P, M>() for the dtypes of parameters P and moments M.
  template <class Body>
  void dispatch(Body&& body) const {
    ScalarType moment = exp_avgs[0].scalar_type();
    dispatch_floating(op, params[0].scalar_type(), [&]<class P>() {
      if (moment == ScalarType::Float) return body.template operator()<P, float>();
      if constexpr (std::is_same_v<P, double>) {
        if (moment == ScalarType::Double) return body.template operator()<P, double>();
      }
      fail(op, ": exp_avgs must be float32 (or float64 for float64 params), got ",
           dtype_name(moment), ".");
    });
  }
};

// Launches the step of kParts, or the one that rounds by chance. Largest: AMSGrad's column, if any.
template <int kParts, class P, class M, class... Largest>
void launch_adam(const AdamCall& call, const TensorTable& table) {
  using G = std::conditional_t<(kParts & kUnscales) != 0, InOut<P>, In<P>>;
  using Moment = InOut<M>;
  const Context context(call.params[0]);
  const AdamLaunch<P, kParts> step{call.hyper, call.sign};
  if constexpr ((kParts & kMasters) != 0) {
    foreach<Out<P>, G, Moment, Moment, InOut<float>, Largest...>(context, table, step);
  } else {
    if constexpr (std::is_same_v<P, BFloat16>) {
      const AdamLaunch<P, kParts | kStochastic> rounded{call.hyper, call.sign};
      using Param = InOut<CutBFloat16>;
      if (call.rounds) {
        return foreach<Param, G, Moment, Moment, Largest...>(context, table, rounded);
      }
    }
    foreach<InOut<P>, G, Moment, Moment, Largest...>(context, table, step);
  }
}

// The same for lists with AMSGrad's maxima; kUnscales, or nothing, is what `parts` may hold.
void launch_amsgrad(const AdamCall& call, const TensorTable& table, int parts);

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
