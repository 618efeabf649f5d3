// Matrix products of cuBLASLt and hipBLASLt with epilogues that torch has no function for.
#pragma once

#include <map>
#include <mutex>

#include "apex/torch/blaslt_library.h"
#include "apex/torch/context.h"
#include "apex/torch/dispatch.h"

namespace apex::blaslt {
inline namespace APEX_BACKEND_NS {

// What became of a product. But for the first, nothing was written, and the caller composes the
// same from torch's operators. native/blaslt.py has these numbers.
enum class Outcome : int64_t { kDone = 0, kNoLibrary = 1, kNoHandle = 2, kNoAlgorithm = 3 };

#if defined(APEX_RTC_HOST)
inline Library open_library() {
  const Numbers& numbers = rtc_connection().is_hip ? kHipblas : kCublas;
  return {numbers, numbers.library_names};
}
#elif defined(APEX_CUDA)
inline Library open_library() { return {kCublas, kCublas.library_names}; }
#elif defined(APEX_HIP)
inline Library open_library() { return {kHipblas, kHipblas.library_names}; }
#else  // whoever brought the GPU has brought this
inline Library open_library();
#endif

// The library of this process, with a handle for each device, and the algorithms that it chose.
class BlasLt {
 public:
  static BlasLt& instance() {
    static BlasLt* own = new BlasLt;  // never destroyed: at exit the driver may be gone before
    return *own;
  }

  Outcome multiply(const Context& context, const Tensor& like, const Product& p) {
    if (!library_.is_open()) return Outcome::kNoLibrary;
    if (p.has_aux() && p.m % kAuxStrideUnit != 0) return Outcome::kNoAlgorithm;
    int32_t device = like.get_device_index();
    Library::Handle handle = handle_of(device);
    if (handle == nullptr) return Outcome::kNoHandle;
    Description description(library_, p);
    check_success(description.failed, description.status);
    Algorithm algorithm = algorithm_for(device, handle, p, description);
    if (!algorithm.is_found) return Outcome::kNoAlgorithm;
    size_t bytes = algorithm.workspace_bytes;
    void* workspace = bytes > 0 ? context.workspace(bytes) : nullptr;
    check_success("Matmul", launch(description, handle, algorithm, workspace, context.stream()));
    return Outcome::kDone;
  }

 private:
  // Everything that a choice depends on.
  using Key = std::array<int64_t, 10>;
  static constexpr size_t kMaxChoices = 4096;  // of programs whose sizes never repeat

  BlasLt() : library_(open_library()) {}

  Library::Handle handle_of(int32_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto [entry, is_new] = handles_.try_emplace(device, nullptr);
    if (is_new && library_.create(&entry->second) != kSuccess) entry->second = nullptr;
    return entry->second;
  }

  Algorithm algorithm_for(int32_t device, Library::Handle handle, const Product& p,
                          Description& description) {
    Key key = {device,
               p.m,
               p.n,
               p.k,
               p.transposes_a * 2 + p.transposes_b,
               static_cast<int64_t>(p.operands),
               static_cast<int64_t>(p.result),
               static_cast<int64_t>(p.epilogue),
               p.beta != 0,
               p.alignment()};
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = algorithms_.find(key);
    if (found != algorithms_.end()) return found->second;
    Algorithm chosen = description.choose(handle);
    check_success(description.failed, description.status);
    if (algorithms_.size() >= kMaxChoices) algorithms_.clear();
    algorithms_.emplace(key, chosen);
    return chosen;
  }

  // One at a time: not every hipBLASLt says that threads may share a handle.
  int32_t launch(const Description& description, Library::Handle handle, const Algorithm& algorithm,
                 void* workspace, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return description.multiply(handle, algorithm, workspace, stream);
  }

  void check_success(const char* function, int32_t status) const {
    check(status == kSuccess, library_.numbers().prefix, function, " returned ", status,
          ". DISABLE_ADDMM_CUDA_LT=1 keeps matrix products from this library.");
  }

  Library library_;
  std::mutex mutex_;
  std::map<int32_t, Library::Handle> handles_;
  std::map<Key, Algorithm> algorithms_;
};

// A contiguous matrix by its argument's name, and whether a product takes it transposed.
struct Factor {
  const char* name;
  const Tensor& matrix;
  bool is_transposed = false;
};

inline Type type_of(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Type::kFloat;
    case ScalarType::Half:
      return Type::kHalf;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    default:
      fail(op, ": ", name, " must be float32, float16 or bfloat16, got ", describe(tensor), ".");
  }
}

inline void check_matrix(const char* op, const NamedTensor& given, int64_t rows, int64_t columns,
                         ScalarType dtype, const NamedTensor& like) {
  const Tensor& tensor = *given.tensor;
  check(tensor.dim() == 2, op, ": ", given.name, " must be a matrix, got ", describe(tensor), ".");
  check(tensor.size(0) == rows && tensor.size(1) == columns, op, ": ", given.name,
        " must have shape [", rows, ", ", columns, "], got ", describe(tensor), ".");
  check_like(op, given, product({rows, columns}), dtype, like);
}

// result = left @ right, all of them stored by rows. Column-major this is the product of the
// transposes in the other order: `right` is the library's a, and what runs along its columns (bias,
// aux) runs along the rows here.
inline Product product_of(const char* op, Factor left, Factor right, const NamedTensor& written,
                          Epilogue epilogue, float beta = 0) {
  const Tensor &like = left.matrix, &result = *written.tensor;
  const NamedTensor first{left.name, like};
  check_tensors(op, {first, {right.name, right.matrix}, written});
  check(like.dim() == 2 && right.matrix.dim() == 2 && like.is_contiguous(), op, ": ", left.name,
        " and ", right.name, " must be contiguous matrices, got ", describe(like), " and ",
        describe(right.matrix), ".");
  int64_t rows = like.size(left.is_transposed ? 1 : 0);
  int64_t inner = like.size(left.is_transposed ? 0 : 1);
  int64_t columns = right.matrix.size(right.is_transposed ? 0 : 1);
  check_matrix(op, {right.name, right.matrix}, right.is_transposed ? columns : inner,
               right.is_transposed ? inner : columns, like.scalar_type(), first);
  check_matrix(op, written, rows, columns, result.scalar_type(), first);
  check(rows > 0 && columns > 0 && inner > 0, op, ": ", left.name, " and ", right.name,
        " must have elements, got ", describe(like), " and ", describe(right.matrix), ".");
  return {.m = columns,
          .n = rows,
          .k = inner,
          .transposes_a = right.is_transposed,
          .transposes_b = left.is_transposed,
          .operands = type_of(op, left.name, like),
          .result = type_of(op, written.name, result),
          .epilogue = epilogue,
          .beta = beta,
          .a = operand(right.matrix, right.name),
          .b = operand(like, left.name),
          .d = operand(result, written.name),
          .bias = nullptr,
          .aux = nullptr};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex::blaslt

#if defined(APEX_BLASLT_HEADER)
#include APEX_BLASLT_HEADER
#endif
