// cuBLASLt and hipBLASLt as libraries: found at run time, and what their functions are given.
//
// torch brings one of them, so nothing is linked, and no header of theirs is needed. The
// declarations below are our own. Names, numbers and sizes are those of cublasLt.h (CUDA 12 and 13,
// https://docs.nvidia.com/cuda/cublas) and of hipblaslt.h (ROCm 6 and 7,
// https://rocm.docs.amd.com/projects/hipBLASLt); shared_csrc/tests/test_blaslt.py compares them
// with cublasLt.h where it is found. Only functions that keep their structures to themselves are
// called.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "apex/core/config.h"

// glibc 2.34 moved these functions from libdl to libc; wheels load on older ones, too.
#if defined(APEX_RTC_HOST) && defined(__x86_64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#elif defined(APEX_RTC_HOST) && defined(__aarch64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.17");
__asm__(".symver dlsym,dlsym@GLIBC_2.17");
#endif

namespace apex::blaslt {
inline namespace APEX_BACKEND_NS {

// Of both libraries.
enum class Type : int32_t { kFloat = 0, kHalf = 2, kBFloat16 = 14 };
enum class Epilogue : uint32_t {
  kNone = 1,
  kGeluAux = 160,        // GELU (tanh form) of the product, which is stored too
  kGeluAuxBias = 164,    // the same, with a bias added to the product first
  kDGelu = 192,          // the product times GELU's slope
  kDGeluBiasGrad = 208,  // the same, and its sums over the library's columns
  kBiasGradB = 512,      // the product, and sums of its second operand
};

// What differs between the two.
struct Numbers {
  const char* prefix;                        // of functions' names
  std::array<const char*, 3> library_names;  // newest first
  int32_t not_transposed, transposed, compute_float;
  // Attributes of a product:
  int32_t transposes_a, transposes_b, epilogue, bias_pointer, bias_type, aux_pointer, aux_stride;
  // Attributes of preferences; below 0: there is none.
  int32_t workspace, reductions, alignment_a;
  size_t algorithm_bytes;  // at the start of a heuristic's result
};

inline constexpr Numbers kCublas = {
    .prefix = "cublasLt",
    .library_names = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
    .not_transposed = 0,
    .transposed = 1,
    .compute_float = 68,
    .transposes_a = 3,
    .transposes_b = 4,
    .epilogue = 7,
    .bias_pointer = 8,
    .bias_type = 26,
    .aux_pointer = 11,
    .aux_stride = 12,
    .workspace = 1,
    .reductions = 3,
    .alignment_a = 5,
    .algorithm_bytes = 64,
};
inline constexpr Numbers kHipblas = {
    .prefix = "hipblasLt",
    .library_names = {"libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"},
    .not_transposed = 111,
    .transposed = 112,
    .compute_float = 2,
    .transposes_a = 0,
    .transposes_b = 1,
    .epilogue = 2,
    .bias_pointer = 3,
    .bias_type = 4,
    .aux_pointer = 10,
    .aux_stride = 11,
    .workspace = 1,
    .reductions = -1,
    .alignment_a = -1,
    .algorithm_bytes = 24,
};

// An algorithm as the library's heuristic gives it, and what it needs.
struct Algorithm {
  alignas(16) std::array<std::byte, 64> data;
  uint64_t workspace_bytes;
  bool is_found;
};

// After `algorithm_bytes`; the whole is 96 bytes for cuBLASLt and 56 for hipBLASLt.
struct HeuristicTail {
  uint64_t workspace_bytes;
  int32_t status;
  float waves;
  int32_t reserved[4];
};

inline constexpr int32_t kSuccess = 0;
inline constexpr uint64_t kMaxWorkspaceBytes = 32 << 20;  // what NVIDIA advises for Hopper
inline constexpr uint32_t kReducesInFloat = 2;            // parts of a sum, never in 16 bits
// Strides of `aux` that both libraries take.
inline constexpr int64_t kAuxStrideUnit = 8;

// One product as the library sees it, whose matrices are column-major:
// d [m, n] = epilogue(op(a) [m, k] @ op(b) [k, n] + beta * d).
struct Product {
  int64_t m, n, k;
  bool transposes_a, transposes_b;
  Type operands, result;
  Epilogue epilogue;
  float beta;
  const void *a, *b;
  void *d, *bias, *aux;  // the last two for epilogues that have them

  bool has_bias() const {
    return epilogue == Epilogue::kGeluAuxBias || epilogue == Epilogue::kDGeluBiasGrad ||
           epilogue == Epilogue::kBiasGradB;
  }
  bool has_aux() const { return static_cast<uint32_t>(epilogue) & 128; }

  // What all pointers are a multiple of, in bytes; 256 at most, the libraries' own unit.
  uint32_t alignment() const {
    uintptr_t bits = 256;
    for (const void* pointer : {a, b, static_cast<const void*>(d)}) {
      bits |= reinterpret_cast<uintptr_t>(pointer);
    }
    if (has_bias()) bits |= reinterpret_cast<uintptr_t>(bias);
    if (has_aux()) bits |= reinterpret_cast<uintptr_t>(aux);
    return static_cast<uint32_t>(bits & (~bits + 1));
  }
};

// The functions of an open library; of none without one.
class Library {
 public:
  using Handle = void*;
  using Object = void*;  // a description, which the library allocates

  Library() = default;

  // Of the libraries of these names, the one that torch has loaded, or else the first that loads.
  Library(const Numbers& numbers, std::span<const char* const> names) : numbers_(&numbers) {
    for (int mode : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
      for (const char* name : names) {
        if (void* opened = dlopen(name, mode); opened && find_all(opened)) return;
      }
    }
  }

  bool is_open() const { return is_open_; }
  const Numbers& numbers() const { return *numbers_; }

  int32_t (*create)(Handle*) = nullptr;
  int32_t (*product_create)(Object*, int32_t compute_type, int32_t scale_type) = nullptr;
  int32_t (*product_destroy)(Object) = nullptr;
  int32_t (*product_set)(Object, int32_t attribute, const void*, size_t) = nullptr;
  int32_t (*layout_create)(Object*, int32_t type, uint64_t rows, uint64_t columns,
                           int64_t stride) = nullptr;
  int32_t (*layout_destroy)(Object) = nullptr;
  int32_t (*preference_create)(Object*) = nullptr;
  int32_t (*preference_destroy)(Object) = nullptr;
  int32_t (*preference_set)(Object, int32_t attribute, const void*, size_t) = nullptr;
  int32_t (*heuristic)(Handle, Object product, Object a, Object b, Object c, Object d,
                       Object preference, int32_t wanted, void* results, int32_t* found) = nullptr;
  int32_t (*multiply)(Handle, Object product, const void* alpha, const void* a, Object layout_a,
                      const void* b, Object layout_b, const void* beta, const void* c,
                      Object layout_c, void* d, Object layout_d, const void* algorithm,
                      void* workspace, size_t workspace_bytes, void* stream) = nullptr;

 private:
  bool find_all(void* opened) {
    auto find = [&]<class F>(F& function, const char* name) {
      function = reinterpret_cast<F>(dlsym(opened, (numbers_->prefix + std::string(name)).c_str()));
      return function != nullptr;
    };
    is_open_ =
        find(create, "Create") && find(product_create, "MatmulDescCreate") &&
        find(product_destroy, "MatmulDescDestroy") && find(product_set, "MatmulDescSetAttribute") &&
        find(layout_create, "MatrixLayoutCreate") && find(layout_destroy, "MatrixLayoutDestroy") &&
        find(preference_create, "MatmulPreferenceCreate") &&
        find(preference_destroy, "MatmulPreferenceDestroy") &&
        find(preference_set, "MatmulPreferenceSetAttribute") &&
        find(heuristic, "MatmulAlgoGetHeuristic") && find(multiply, "Matmul");
    return is_open_;
  }

  const Numbers* numbers_ = nullptr;
  bool is_open_ = false;
};

// The descriptions of one product. `status` is the first one that was no success, with the function
// that gave it; nothing is done after that.
class Description {
 public:
  Description(const Library& library, const Product& p) : library_(library), product_(p) {
    const Numbers& n = library.numbers();
    auto create = [&](void** made) {
      return library.product_create(made, n.compute_float, static_cast<int32_t>(Type::kFloat));
    };
    try_to("MatmulDescCreate", create, product, library.product_destroy);
    set(n.transposes_a, p.transposes_a ? n.transposed : n.not_transposed);
    set(n.transposes_b, p.transposes_b ? n.transposed : n.not_transposed);
    set(n.epilogue, static_cast<uint32_t>(p.epilogue));
    if (p.has_bias()) {
      set(n.bias_pointer, p.bias);
      set(n.bias_type, static_cast<int32_t>(p.result));
    }
    if (p.has_aux()) {
      set(n.aux_pointer, p.aux);
      set(n.aux_stride, p.m);
    }
    make_layout(a, p.operands, p.transposes_a ? p.k : p.m, p.transposes_a ? p.m : p.k);
    make_layout(b, p.operands, p.transposes_b ? p.n : p.k, p.transposes_b ? p.k : p.n);
    make_layout(d, p.result, p.m, p.n);
  }

  // What the heuristic may choose from.
  void make_preference() {
    const Numbers& n = library_.numbers();
    try_to("MatmulPreferenceCreate", library_.preference_create, preference,
           library_.preference_destroy);
    prefer(n.workspace, kMaxWorkspaceBytes);
    if (n.reductions >= 0) prefer(n.reductions, kReducesInFloat);
    // Of a, b, c and d, whose attributes follow each other.
    for (int32_t i = 0; i < 4 && n.alignment_a >= 0; ++i) {
      prefer(n.alignment_a + i, product_.alignment());
    }
  }

  // The library's own choice; not found where it has none.
  Algorithm choose(Library::Handle handle) {
    Algorithm algorithm = {};
    make_preference();
    if (status != kSuccess) return algorithm;
    alignas(16) std::array<std::byte, 64 + sizeof(HeuristicTail)> result = {};
    int32_t found = 0;
    int32_t answer = library_.heuristic(handle, product.get(), a.get(), b.get(), d.get(), d.get(),
                                        preference.get(), 1, result.data(), &found);
    size_t bytes = library_.numbers().algorithm_bytes;
    HeuristicTail tail;
    std::memcpy(&tail, result.data() + bytes, sizeof(tail));
    if (answer != kSuccess || found < 1 || tail.status != kSuccess) return algorithm;
    std::memcpy(algorithm.data.data(), result.data(), bytes);
    algorithm.workspace_bytes = tail.workspace_bytes;
    algorithm.is_found = tail.workspace_bytes <= kMaxWorkspaceBytes;
    return algorithm;
  }

  int32_t multiply(Library::Handle handle, const Algorithm& algorithm, void* workspace,
                   void* stream) const {
    const float alpha = 1;
    return library_.multiply(handle, product.get(), &alpha, product_.a, a.get(), product_.b,
                             b.get(), &product_.beta, product_.d, d.get(), product_.d, d.get(),
                             algorithm.data.data(), workspace, algorithm.workspace_bytes, stream);
  }

  using Object = std::unique_ptr<void, int32_t (*)(void*)>;
  Object product{nullptr, nullptr}, a{nullptr, nullptr}, b{nullptr, nullptr}, d{nullptr, nullptr},
      preference{nullptr, nullptr};
  int32_t status = kSuccess;
  const char* failed = "";

 private:
  template <class Create>
  void try_to(const char* name, Create create, Object& object, int32_t (*destroy)(void*)) {
    if (status != kSuccess) return;
    void* made = nullptr;
    note(name, create(&made));
    if (status == kSuccess) object = Object(made, destroy);
  }

  void make_layout(Object& layout, Type type, int64_t rows, int64_t columns) {
    auto create = [&](void** made) {
      return library_.layout_create(made, static_cast<int32_t>(type), static_cast<uint64_t>(rows),
                                    static_cast<uint64_t>(columns), rows);
    };
    try_to("MatrixLayoutCreate", create, layout, library_.layout_destroy);
  }

  // The value's type says how many bytes the library is given, which it checks.
  template <class Value>
  void set(int32_t attribute, Value value) {
    if (status != kSuccess) return;
    note("MatmulDescSetAttribute",
         library_.product_set(product.get(), attribute, &value, sizeof(value)));
  }

  template <class Value>
  void prefer(int32_t attribute, Value value) {
    if (status != kSuccess) return;
    note("MatmulPreferenceSetAttribute",
         library_.preference_set(preference.get(), attribute, &value, sizeof(value)));
  }

  void note(const char* name, int32_t answer) {
    if (answer == kSuccess) return;
    status = answer;
    failed = name;
  }

  const Library& library_;
  const Product& product_;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::blaslt
