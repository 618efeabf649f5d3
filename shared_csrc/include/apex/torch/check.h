// Checks of op arguments: a failure raises RuntimeError in Python with the given text alone.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>

namespace apex {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return "an unsupported dtype";
  }
}

// "[4096, 1024] float32 on device 0", for messages; written only where check() fails.
struct Description {
  const Tensor& tensor;

  friend std::ostream& operator<<(std::ostream& text, const Description& description) {
    const Tensor& tensor = description.tensor;
    text << '[';
    auto sizes = tensor.sizes();
    for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
    text << "] " << dtype_name(tensor.scalar_type());
    if (tensor.is_cpu()) return text << " on cpu";
    return text << " on device " << tensor.get_device_index();
  }
};

inline Description describe(const Tensor& tensor) { return {tensor}; }

}  // namespace apex
