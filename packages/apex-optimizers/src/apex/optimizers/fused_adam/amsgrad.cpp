// The launches with AMSGrad's maxima: a second translation unit, compiled beside the first.
//
// All of them clip, by 1 where nothing is clipped, which rounds nothing: half as many kernels.
#include "registration.h"

namespace apex::optimizers {
inline namespace APEX_BACKEND_NS {
namespace {

template <int kParts, class P, class M>
void launch(const AdamCall& call, const TensorTable& table) {
  if (call.masters.empty()) return launch_adam<kParts, P, M, InOut<M>>(call, table);
  if constexpr (std::is_same_v<P, Half> || std::is_same_v<P, BFloat16>) {
    launch_adam<kParts | kMasters, P, M, InOut<M>>(call, table);
  } else {
    fail(call.op, ": with max_exp_avg_sqs, masters are for float16 and bfloat16 params, got ",
         dtype_name(call.params[0].scalar_type()), ".");
  }
}

}  // namespace

void launch_amsgrad(const AdamCall& call, const TensorTable& table, int parts) {
  call.dispatch([&]<class P, class M>() {
    if constexpr (std::is_same_v<compute_t<P>, M>) {
      dispatch_bool((parts & kUnscales) != 0, [&]<bool kScaled>() {
        launch<kClips | (kScaled ? kUnscales : 0), P, M>(call, table);
      });
    } else {
      fail(call.op, ": with max_exp_avg_sqs, exp_avgs must be float64 for float64 params, got ",
           dtype_name(call.exp_avgs[0].scalar_type()), ".");
    }
  });
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::optimizers
