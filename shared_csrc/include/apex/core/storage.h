// Storage types that are known only when an op runs: one kernel for several dtypes of an operand.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

enum class Storage : int { kFloat, kHalf, kBFloat16, kFloat8, kOther };

// Storage type of a column whose Storage the table says: InOut<AnyFloat>. It takes a uniform branch
// per pack, and saves compiling a kernel per dtype where an op has several such operands.
struct AnyFloat {};

// Calls body.template operator()<S>() with the storage type.
template <class Body>
APEX_HD void dispatch_storage(Storage storage, Body&& body) {
  switch (storage) {
    case Storage::kHalf:
      return body.template operator()<Half>();
    case Storage::kBFloat16:
      return body.template operator()<BFloat16>();
    case Storage::kFloat8:
      return body.template operator()<Float8>();
    default:
      return body.template operator()<float>();
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
