// Registers focal_loss: checks, types and launch; the mathematics is in focal_loss.h.
#include "focal_loss.h"

#include "apex/engine/rowwise.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"
#include "apex/torch/library.h"
#include "apex/torch/like.h"
#include "short_rows.h"

namespace apex::contrib {
inline namespace APEX_BACKEND_NS {
namespace {

// The formula's numbers, as the operators take them.
struct Numbers {
  int64_t classes;
  double alpha, gamma, smoothing;
};

const int64_t* targets_of(const char* op, const Tensor& x, const Tensor& targets,
                          const Numbers& numbers) {
  check_tensors(op, {{"x", x}});
  check(x.dim() == 2 && x.is_contiguous(), op, ": x must be contiguous [N, C], got ", describe(x),
        ".");
  check_like(op, {"targets", targets}, x.size(0), ScalarType::Long, {"x", x});
  check(numbers.classes >= 0 && numbers.classes <= x.size(1), op, ": classes must be 0 to ",
        x.size(1), ", the columns of x, got ", numbers.classes, ".");
  check(numbers.gamma >= 0, op, ": gamma must not be negative, got ", numbers.gamma, ".");
  const int64_t* result = data<int64_t>(targets, "targets");
#if defined(APEX_CPU)  // a GPU would have to be waited for
  for (int64_t row = 0; row < x.size(0); ++row) {
    check(result[row] < numbers.classes, op, ": targets[", row, "] is ", result[row], ", but ",
          numbers.classes, " classes are real: expected 0 to ", numbers.classes - 1,
          ", -1 for background, or -2 to ignore the row.");
  }
#endif
  return result;
}

// Calls body<S, whether gamma is 2>().
template <class Body>
void dispatch_gamma(const char* op, const Tensor& x, double gamma, Body&& body) {
  dispatch_floating(op, x.scalar_type(), [&]<class S>() {
    dispatch_bool(gamma == 2, [&]<bool kSquared>() { body.template operator()<S, kSquared>(); });
  });
}

template <class S, bool kSquared>
FocalLoss<S, kSquared> loss_of(const Tensor& x, const int64_t* targets, const Numbers& numbers) {
  using T = compute_t<S>;
  auto term = [&](double weight) {
    return FocalTerm<T, kSquared>{static_cast<T>(weight), static_cast<T>(numbers.gamma),
                                  static_cast<T>(numbers.smoothing / 2)};
  };
  return {data<S>(x, "x"), targets, numbers.classes, term(numbers.alpha), term(1 - numbers.alpha)};
}

#if defined(APEX_CPU)
bool are_short(const Tensor& x, int64_t classes) {
  return classes == x.size(1) && classes > 0 && classes <= kShortRow;
}

template <class Program>
void run_short_rows(const Context& context, const Program& program) {
  const int64_t together = program.rows_together();
  rowwise(context, (program.rows + together - 1) / together, together * program.classes, program);
}
#endif

Tensor forward(const Tensor& x, const Tensor& targets, int64_t classes, double alpha, double gamma,
               double smoothing) {
  const char* op = "focal_loss_forward";
  const Numbers numbers{classes, alpha, gamma, smoothing};
  const int64_t* target = targets_of(op, x, targets, numbers);
  Tensor losses = empty(x, {x.size(0)}, statistics_dtype(x));
  Context context(x);
  dispatch_gamma(op, x, gamma, [&]<class S, bool kSquared>() {
    const auto loss = loss_of<S, kSquared>(x, target, numbers);
    auto* result = data<compute_t<S>>(losses, "losses");
#if defined(APEX_CPU)
    if (are_short(x, classes)) {
      return run_short_rows(context, ShortRowsForward<S, kSquared>{{loss, x.size(0)}, result});
    }
#endif
    rowwise(context, x.size(0), x.size(1), FocalLossForward<S, kSquared>{loss, result});
  });
  return losses;
}

Tensor backward(const Tensor& grad_losses_of_any_layout, const Tensor& x, const Tensor& targets,
                int64_t classes, double alpha, double gamma, double smoothing) {
  const char* op = "focal_loss_backward";
  const Numbers numbers{classes, alpha, gamma, smoothing};
  const int64_t* target = targets_of(op, x, targets, numbers);
  check_tensors(op, {{"grad_losses", grad_losses_of_any_layout}});
#if defined(APEX_CPU)
  const bool is_read_in_place = grad_losses_of_any_layout.dim() == 1;  // often one number, expanded
#else
  const bool is_read_in_place = false;
#endif
  Tensor grad_losses =
      is_read_in_place ? grad_losses_of_any_layout : as_contiguous(grad_losses_of_any_layout);
  const int64_t stride = is_read_in_place ? grad_losses.stride(0) : 1;
  check(grad_losses.dim() == 1 && grad_losses.size(0) == x.size(0) &&
            grad_losses.scalar_type() == statistics_dtype(x) &&
            grad_losses.is_cpu() == x.is_cpu() &&
            grad_losses.get_device_index() == x.get_device_index(),
        op, ": grad_losses must have ", x.size(0), " elements of ", dtype_name(statistics_dtype(x)),
        " in one dimension,", " on the device of x; got ", describe(grad_losses), ", x is ",
        describe(x), ".");
  Tensor grad_x = empty_like(x, x.scalar_type());
  Context context(x);
  dispatch_gamma(op, x, gamma, [&]<class S, bool kSquared>() {
    const auto loss = loss_of<S, kSquared>(x, target, numbers);
    const Strided<compute_t<S>> grads{data<compute_t<S>>(grad_losses, "grad_losses"), stride};
    S* result = data<S>(grad_x, "grad_x");
#if defined(APEX_CPU)
    if (are_short(x, classes)) {
      return run_short_rows(context,
                            ShortRowsBackward<S, kSquared>{{loss, x.size(0)}, grads, result});
    }
#endif
    rowwise(context, x.size(0), x.size(1), FocalLossBackward<S, kSquared>{loss, grads, result});
  });
  return grad_x;
}

}  // namespace

APEX_KERNELS(apex_contrib, m) {
  m.impl("focal_loss_forward", TORCH_BOX(&forward));
  m.impl("focal_loss_backward", TORCH_BOX(&backward));
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::contrib
