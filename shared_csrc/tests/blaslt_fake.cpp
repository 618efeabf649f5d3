// A stand-in for cuBLASLt and hipBLASLt, whose functions it has under both prefixes: loops over
// column-major matrices with the documented meaning of the epilogues, and the checks of sizes and
// shapes that NVIDIA's library makes. Its numbers are written down from the two manuals again, so
// that a wrong one in apex/torch/blaslt_library.h is refused here.
//
// APEX_FAKE_BLASLT names a function that fails: Create, Heuristic or Matmul.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "apex/core/types.h"

namespace {

enum { kSuccess = 0, kNotInitialized = 1, kInvalid = 7, kFailed = 13, kUnsupported = 15 };
enum { kFloat = 0, kHalf = 2, kBFloat16 = 14 };
enum { kBias = 4, kBiasGrad = 16, kGelu = 32, kDGelu = 64, kAux = 128, kBiasGradB = 512 };

struct Product {
  int32_t compute, scale, op_a = -1, op_b = -1, bias_type = -1;
  uint32_t epilogue = 1;
  void *bias = nullptr, *aux = nullptr;
  int64_t aux_stride = 0;
};
struct Layout {
  int32_t type;
  int64_t rows, columns, stride;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 7, alignments[4] = {256, 256, 256, 256};
};
// What an algorithm is good for; 24 bytes, as many as hipBLASLt's has.
struct Algorithm {
  uint32_t magic, epilogue, alignment, sizes[3];
};
constexpr uint32_t kMagic = 0xb1a5;
constexpr size_t kWorkspaceBytes = 1024;

struct Amd {
  static constexpr int32_t kTransposed = 112, kNotTransposed = 111, kCompute = 2;
  static constexpr size_t kAlgorithmBytes = 24;
  static void* attribute(Product& p, int32_t number, size_t& bytes) {
    switch (number) {
      case 0:
        return bytes = 4, &p.op_a;
      case 1:
        return bytes = 4, &p.op_b;
      case 2:
        return bytes = 4, &p.epilogue;
      case 3:
        return bytes = 8, &p.bias;
      case 4:
        return bytes = 4, &p.bias_type;
      case 10:
        return bytes = 8, &p.aux;
      case 11:
        return bytes = 8, &p.aux_stride;
      default:
        return nullptr;
    }
  }
  static void* attribute(Preference& p, int32_t number, size_t& bytes) {
    return number == 1 ? (bytes = 8, &p.workspace) : nullptr;
  }
};
struct Nvidia {
  static constexpr int32_t kTransposed = 1, kNotTransposed = 0, kCompute = 68;
  static constexpr size_t kAlgorithmBytes = 64;
  static void* attribute(Product& p, int32_t number, size_t& bytes) {
    switch (number) {
      case 3:
        return bytes = 4, &p.op_a;
      case 4:
        return bytes = 4, &p.op_b;
      case 7:
        return bytes = 4, &p.epilogue;
      case 8:
        return bytes = 8, &p.bias;
      case 26:
        return bytes = 4, &p.bias_type;
      case 11:
        return bytes = 8, &p.aux;
      case 12:
        return bytes = 8, &p.aux_stride;
      default:
        return nullptr;
    }
  }
  static void* attribute(Preference& p, int32_t number, size_t& bytes) {
    if (number == 1) return bytes = 8, &p.workspace;
    if (number == 3) return bytes = 4, &p.reductions;
    return 5 <= number && number <= 8 ? (bytes = 4, &p.alignments[number - 5]) : nullptr;
  }
};

int handle;

bool fails(const char* function) {
  const char* named = std::getenv("APEX_FAKE_BLASLT");
  return named != nullptr && std::string(named) == function;
}

float load(const void* data, int32_t type, int64_t i) {
  if (type == kHalf) return apex::convert<float>(static_cast<const apex::Half*>(data)[i]);
  if (type == kBFloat16) return apex::convert<float>(static_cast<const apex::BFloat16*>(data)[i]);
  return static_cast<const float*>(data)[i];
}
void store(void* data, int32_t type, int64_t i, float value) {
  if (type == kHalf) {
    static_cast<apex::Half*>(data)[i] = apex::convert<apex::Half>(value);
  } else if (type == kBFloat16) {
    static_cast<apex::BFloat16*>(data)[i] = apex::convert<apex::BFloat16>(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

constexpr double kSlope = 0.7978845608028654, kCubic = 0.044715;  // sqrt(2 / pi)
float gelu(float x) {
  return static_cast<float>(0.5 * x * (1 + std::tanh(kSlope * (x + kCubic * x * x * x))));
}
float gelu_slope(float x) {
  double t = std::tanh(kSlope * (x + kCubic * x * x * x));
  double inner = kSlope * (1 + 3 * kCubic * x * x);
  return static_cast<float>(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner);
}

template <class Vendor>
int32_t set(auto* object, int32_t number, const void* value, size_t given) {
  size_t bytes = 0;
  void* place = Vendor::attribute(*object, number, bytes);
  if (place == nullptr || value == nullptr || given != bytes) return kInvalid;
  std::memcpy(place, value, bytes);
  return kSuccess;
}

bool is_type(int32_t type) { return type == kFloat || type == kHalf || type == kBFloat16; }

// Whether shapes, types and the epilogue's operands belong together.
template <class Vendor>
bool fits(const Product& p, const Layout& a, const Layout& b, const Layout& d, int64_t& inner) {
  for (int32_t op : {p.op_a, p.op_b}) {
    if (op != Vendor::kTransposed && op != Vendor::kNotTransposed) return false;
  }
  bool turns_a = p.op_a == Vendor::kTransposed, turns_b = p.op_b == Vendor::kTransposed;
  inner = turns_a ? a.rows : a.columns;
  if (p.compute != Vendor::kCompute || p.scale != kFloat) return false;
  if ((turns_a ? a.columns : a.rows) != d.rows || (turns_b ? b.columns : b.rows) != inner) {
    return false;
  }
  if ((turns_b ? b.rows : b.columns) != d.columns || a.type != b.type) return false;
  bool is_grad = p.epilogue & (kBiasGrad | kBiasGradB);
  if (((p.epilogue & kBias) || is_grad) && (p.bias == nullptr || p.bias_type != d.type)) {
    return false;
  }
  if (!(p.epilogue & kAux)) return true;
  return p.aux != nullptr && p.aux_stride >= d.rows && p.aux_stride % 8 == 0;
}

template <class Vendor>
int32_t heuristic(void* given, Product* p, Layout* a, Layout* b, Layout* c, Layout* d,
                  Preference* preference, int32_t wanted, std::byte* results, int32_t* found) {
  int64_t inner = 0;
  *found = 0;
  if (given != &handle || wanted != 1 || c != d) return kInvalid;
  if (!fits<Vendor>(*p, *a, *b, *d, inner)) return kInvalid;
  if (fails("Heuristic") || preference->workspace < kWorkspaceBytes) return kUnsupported;
  uint32_t least = 256;
  for (uint32_t alignment : preference->alignments) least = std::min(least, alignment);
  Algorithm algorithm = {kMagic,
                         p->epilogue,
                         least,
                         {static_cast<uint32_t>(d->rows), static_cast<uint32_t>(d->columns),
                          static_cast<uint32_t>(inner)}};
  std::memcpy(results, &algorithm, sizeof(algorithm));
  uint64_t bytes = kWorkspaceBytes;
  std::memcpy(results + Vendor::kAlgorithmBytes, &bytes, 8);
  std::memset(results + Vendor::kAlgorithmBytes + 8, 0, 4);  // success
  *found = 1;
  return kSuccess;
}

bool is_aligned(const void* pointer, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <class Vendor>
int32_t multiply(void* given, Product* p, const float* alpha, const void* a, Layout* in_a,
                 const void* b, Layout* in_b, const float* beta, const void* c, Layout* in_c,
                 void* d, Layout* in_d, const Algorithm* algorithm, void* workspace, size_t bytes,
                 void*) {
  int64_t k = 0, m = in_d->rows, n = in_d->columns;
  if (given != &handle || c != d || in_c != in_d) return kInvalid;
  if (!fits<Vendor>(*p, *in_a, *in_b, *in_d, k)) return kInvalid;
  const uint32_t* sizes = algorithm->sizes;
  if (algorithm->magic != kMagic || algorithm->epilogue != p->epilogue) return kInvalid;
  if (sizes[0] != m || sizes[1] != n || sizes[2] != k) return kInvalid;
  for (const void* pointer : {a, b, static_cast<const void*>(d)}) {
    bool has_promise = Vendor::kCompute == Nvidia::kCompute;
    if (has_promise && !is_aligned(pointer, algorithm->alignment)) return kInvalid;
  }
  if (workspace == nullptr || bytes != kWorkspaceBytes) return kInvalid;
  if (fails("Matmul")) return kFailed;
  std::memset(workspace, 0xff, bytes);
  bool turns_a = p->op_a == Vendor::kTransposed, turns_b = p->op_b == Vendor::kTransposed;
  auto at_b = [&](int64_t i, int64_t j) {
    return load(b, in_b->type, turns_b ? j + i * in_b->stride : i + j * in_b->stride);
  };
  std::vector<double> sums(m, 0);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;  // one after the other, float would lose more than the library's trees do
      for (int64_t l = 0; l < k; ++l) {
        int64_t of_a = turns_a ? l + i * in_a->stride : i + l * in_a->stride;
        sum += load(a, in_a->type, of_a) * at_b(l, j);
      }
      int64_t place = i + j * in_d->stride, of_aux = i + j * p->aux_stride;
      float value = static_cast<float>(*alpha * sum);
      if (*beta != 0) value += *beta * load(d, in_d->type, place);
      if (p->epilogue & kBias) value += load(p->bias, p->bias_type, i);
      if (p->epilogue & kGelu) {
        if (p->epilogue & kAux) store(p->aux, in_d->type, of_aux, value);
        value = gelu(value);
      }
      if (p->epilogue & kDGelu) value *= gelu_slope(load(p->aux, in_d->type, of_aux));
      sums[i] += value;
      store(d, in_d->type, place, value);
    }
  }
  for (int64_t i = 0; i < m && (p->epilogue & kBiasGrad); ++i) {
    store(p->bias, p->bias_type, i, static_cast<float>(sums[i]));
  }
  for (int64_t j = 0; j < n && (p->epilogue & kBiasGradB); ++j) {
    double sum = 0;
    for (int64_t l = 0; l < k; ++l) sum += at_b(l, j);
    store(p->bias, p->bias_type, j, static_cast<float>(sum));
  }
  return kSuccess;
}

}  // namespace

#define APEX_FAKE(prefix, Vendor)                                                                  \
  extern "C" {                                                                                     \
  int32_t prefix##Create(void** made) {                                                            \
    *made = &handle;                                                                               \
    return fails("Create") ? kNotInitialized : kSuccess;                                           \
  }                                                                                                \
  int32_t prefix##MatmulDescCreate(Product** made, int32_t compute, int32_t scale) {               \
    *made = new Product{compute, scale};                                                           \
    return kSuccess;                                                                               \
  }                                                                                                \
  int32_t prefix##MatmulDescDestroy(Product* p) { return delete p, kSuccess; }                     \
  int32_t prefix##MatmulDescSetAttribute(Product* p, int32_t number, const void* value,            \
                                         size_t bytes) {                                           \
    return set<Vendor>(p, number, value, bytes);                                                   \
  }                                                                                                \
  int32_t prefix##MatrixLayoutCreate(Layout** made, int32_t type, uint64_t rows, uint64_t columns, \
                                     int64_t stride) {                                             \
    if (!is_type(type) || stride < static_cast<int64_t>(rows)) return kInvalid;                    \
    *made = new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride};   \
    return kSuccess;                                                                               \
  }                                                                                                \
  int32_t prefix##MatrixLayoutDestroy(Layout* l) { return delete l, kSuccess; }                    \
  int32_t prefix##MatmulPreferenceCreate(Preference** made) {                                      \
    return *made = new Preference, kSuccess;                                                       \
  }                                                                                                \
  int32_t prefix##MatmulPreferenceDestroy(Preference* p) { return delete p, kSuccess; }            \
  int32_t prefix##MatmulPreferenceSetAttribute(Preference* p, int32_t number, const void* value,   \
                                               size_t bytes) {                                     \
    return set<Vendor>(p, number, value, bytes);                                                   \
  }                                                                                                \
  int32_t prefix##MatmulAlgoGetHeuristic(void* given, Product* p, Layout* a, Layout* b, Layout* c, \
                                         Layout* d, Preference* preference, int32_t wanted,        \
                                         std::byte* results, int32_t* found) {                     \
    return heuristic<Vendor>(given, p, a, b, c, d, preference, wanted, results, found);            \
  }                                                                                                \
  int32_t prefix##Matmul(void* given, Product* p, const float* alpha, const void* a, Layout* la,   \
                         const void* b, Layout* lb, const float* beta, const void* c, Layout* lc,  \
                         void* d, Layout* ld, const Algorithm* algorithm, void* workspace,         \
                         size_t bytes, void* stream) {                                             \
    return multiply<Vendor>(given, p, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm,          \
                            workspace, bytes, stream);                                             \
  }                                                                                                \
  }
APEX_FAKE(cublasLt, Nvidia)
APEX_FAKE(hipblasLt, Amd)
