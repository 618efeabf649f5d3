// A step whose result also goes, rounded, to a copy in another dtype.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// What a step does with the new parameters beside storing them.
enum class Results { kStore, kCopy, kStochasticRounding };

// For float32 masters of 16-bit parameters: the copy is the first column, the master the second.
template <class Step>
struct WithCopy {
  using value_type = typename Step::value_type;

  Step step;

  template <class... Columns>
  APEX_HD void operator()(value_type& copy, value_type& p, Columns&... columns) const {
    step(p, columns...);
    copy = p;
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
