// Operands of the engines: how each is stored, whether it is read, and whether it is written.
#pragma once

#include <utility>

#include "apex/core/pack.h"
#include "apex/core/table.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

template <class S>
struct In {
  using storage = S;
  static constexpr bool kRead = true, kWritten = false;
};
template <class S>
struct Out {
  using storage = S;
  static constexpr bool kRead = false, kWritten = true;
};
template <class S>
struct InOut {
  using storage = S;
  static constexpr bool kRead = true, kWritten = true;
};

// A functor whose hyper-parameters live on the device turns itself into one of plain numbers with
// prepare(), and may ask with skip() that nothing is done.
template <class F>
APEX_HD auto prepared(const F& functor) {
  if constexpr (requires { functor.prepare(); }) {
    return functor.prepare();
  } else {
    return functor;
  }
}

template <class F>
APEX_HD bool skipped(const F& functor) {
  if constexpr (requires { functor.skip(); }) {
    return functor.skip();
  } else {
    return false;
  }
}

// A functor whose numbers differ from tensor to tensor turns itself into that of one tensor, row
// `tensor` of the table, with for_tensor().
template <class F>
APEX_HD auto of_tensor(const F& functor, int64_t tensor) {
  if constexpr (requires { functor.for_tensor(tensor); }) {
    return functor.for_tensor(tensor);
  } else {
    return functor;
  }
}

// A functor with a generator() is given a number, made from the index of its element, before the
// columns: random bits, say. generator().fill(first, numbers) makes those of an aligned run.
template <class F>
inline constexpr bool generates_v = requires(const F& functor) { functor.generator(); };

template <class F>
struct GeneratedNumber {
  using type = int;  // of no use
};
template <class F>
  requires generates_v<F>
struct GeneratedNumber<F> {
  using type =
      typename std::remove_cvref_t<decltype(std::declval<const F&>().generator())>::value_type;
};

template <class F, class Number, class... Values>
APEX_HD decltype(auto) call_functor(const F& functor, Number number, Values&... values) {
  if constexpr (generates_v<F>) {
    return functor(number, values...);
  } else {
    return functor(values...);
  }
}

// Terms that foreach_fold has seen: added, unless the functor says how by a static combine() with
// identity 0, such as a maximum of values >= 0.
template <class F>
APEX_HD double fold_terms(double a, double b) {
  if constexpr (requires { F::combine(a, b); }) {
    return F::combine(a, b);
  } else {
    return a + b;
  }
}

template <class F>
struct FoldTerms {
  APEX_HD double operator()(double a, double b) const { return fold_terms<F>(a, b); }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
