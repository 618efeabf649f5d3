// Describes products to a library as blaslt.h does, and reads back what the library has kept.
//
// blaslt cublas|hipblas LIBRARY
//
// No GPU is needed: a handle is asked for last, and its status printed.
#include "apex/torch/blaslt_library.h"

#include <cstdio>
#include <string>

using namespace apex::blaslt;

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

using Get = int32_t (*)(void*, int32_t, void*, size_t, size_t*);

// `expected` as it is kept, in as many bytes.
template <class Value>
void check_kept(const char* what, Get get, void* object, int32_t attribute, Value expected) {
  Value kept = {};
  size_t bytes = 0;
  check(get(object, attribute, &kept, sizeof(kept), &bytes) == kSuccess, what);
  check(bytes == sizeof(kept) && kept == expected, what);
}

void read_back(const Description& description, const Product& p, const Numbers& n, Get get) {
  void* product = description.product.get();
  check_kept("transposes a", get, product, n.transposes_a,
             p.transposes_a ? n.transposed : n.not_transposed);
  check_kept("transposes b", get, product, n.transposes_b,
             p.transposes_b ? n.transposed : n.not_transposed);
  check_kept("epilogue", get, product, n.epilogue, static_cast<uint32_t>(p.epilogue));
  if (p.has_bias()) {
    check_kept("bias", get, product, n.bias_pointer, p.bias);
    check_kept("bias type", get, product, n.bias_type, static_cast<int32_t>(p.result));
  }
  if (p.has_aux()) {
    check_kept("aux", get, product, n.aux_pointer, p.aux);
    check_kept("aux stride", get, product, n.aux_stride, p.m);
  }
}

// The library refuses a size that is not the attribute's.
void refuses(const Library& library, void* product, int32_t attribute, size_t bytes) {
  std::array<std::byte, 16> value = {};
  check(library.product_set(product, attribute, value.data(), bytes + 1) != kSuccess, "larger");
  check(library.product_set(product, attribute, value.data(), bytes - 1) != kSuccess, "smaller");
}

void describe_all(const Library& library, Get get) {
  alignas(256) static std::array<float, 1024> memory;
  float* place = memory.data();
  for (Type type : {Type::kHalf, Type::kBFloat16, Type::kFloat}) {
    for (auto epilogue : {Epilogue::kNone, Epilogue::kGeluAux, Epilogue::kGeluAuxBias,
                          Epilogue::kDGelu, Epilogue::kDGeluBiasGrad, Epilogue::kBiasGradB}) {
      for (int turns = 0; turns < 4; ++turns) {
        Product p = {
            16,       8, 24,    (turns & 1) != 0, (turns & 2) != 0, type,        type,
            epilogue, 0, place, place + 4,        place + 64,       place + 128, place + 256};
        check(p.alignment() == 16, "alignment");
        Description description(library, p);
        check(description.status == kSuccess, description.failed);
        description.make_preference();
        check(description.status == kSuccess, description.failed);
        if (get != nullptr) read_back(description, p, library.numbers(), get);
      }
    }
  }
  Product p = {8, 8,     8,     false, false,   Type::kHalf, Type::kFloat, Epilogue::kNone,
               1, place, place, place, nullptr, nullptr};
  Description description(library, p);
  const Numbers& n = library.numbers();
  for (int32_t four : {n.transposes_a, n.transposes_b, n.epilogue, n.bias_type}) {
    refuses(library, description.product.get(), four, 4);
  }
  for (int32_t eight : {n.bias_pointer, n.aux_pointer, n.aux_stride}) {
    refuses(library, description.product.get(), eight, 8);
  }
}

}  // namespace

int main(int, char** arguments) {
  bool is_amd = std::string(arguments[1]) == "hipblas";
  const Numbers& numbers = is_amd ? kHipblas : kCublas;
  const char* path = arguments[2];
  Library library(numbers, std::span(&path, 1));
  if (!library.is_open()) {
    std::printf("closed\n");
    return 0;
  }
  std::string name = std::string(numbers.prefix) + "MatmulDescGetAttribute";
  void* opened = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  auto get = reinterpret_cast<Get>(dlsym(opened, name.c_str()));
  describe_all(library, get);
  Library::Handle handle = nullptr;
  std::printf("%s, handle %d\n", get ? "read back" : "written", library.create(&handle));
  return failures > 0;
}
