// Runs foreach_fold and functors with numbers per tensor on the CPU, against loops in double; exits
// non-zero with a line per mismatch. Compiled as engines.cpp is.
#include "apex/engine/foreach_fold.h"
#include "checks.h"

namespace {

// Of tensor i: x += i, with the sums of the new values and of their squares.
struct AddIndex {
  using value_type = float;
  float index;
  void operator()(double (&terms)[2], float& x) const {
    x += index;
    terms[0] = x;
    terms[1] = static_cast<double>(x) * x;
  }
};

struct AddIndexes {
  using value_type = float;
  AddIndex for_tensor(int64_t tensor) const { return {static_cast<float>(tensor)}; }
};

struct ScaleByIndex {
  using value_type = float;
  float index;
  void operator()(float& x) const { x *= index; }
};

struct ScaleByIndexes {
  using value_type = float;
  ScaleByIndex for_tensor(int64_t tensor) const { return {static_cast<float>(tensor)}; }
};

// Empty tensors keep their rows here: functors count rows.
template <class S>
void test_functors_of_tensors(const std::vector<int64_t>& sizes) {
  std::vector<double> first_sums;
  for (int threads : {1, 2, 3}) {
    std::srand(1);
    std::vector<std::vector<S>> values;
    TensorTable table;
    table.columns = 1;
    for (int64_t size : sizes) values.push_back(random_values<S>(size));
    auto before = values;
    for (size_t t = 0; t < sizes.size(); ++t) {
      table.data.push_back(values[t].data());
      table.numel.push_back(sizes[t]);
    }
    std::vector<double> sums(2 * sizes.size(), -1);
    foreach_fold<2, InOut<S>>(Threads{threads}, table, AddIndexes{}, sums.data());
    for (size_t t = 0; t < sizes.size(); ++t) {
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < sizes[t]; ++i) {
        float x = convert<float>(before[t][i]) + static_cast<float>(t);
        expect_near(convert<float>(values[t][i]), convert<float>(convert<S>(x)), 0, "fold value");
        sum += x;
        squares += static_cast<double>(x) * x;
      }
      expect_near(sums[2 * t], sum, 1e-9 * (1 + std::abs(sum)), "foreach_fold sum");
      expect_near(sums[2 * t + 1], squares, 1e-9 * (1 + squares), "foreach_fold squares");
    }
    if (threads == 1) first_sums = sums;
    for (size_t i = 0; i < sums.size(); ++i) {
      expect_near(sums[i], first_sums[i], 0, "foreach_fold depends on the number of threads");
    }
    auto added = values;
    foreach<InOut<S>>(Threads{threads}, table, ScaleByIndexes{});
    for (size_t t = 0; t < sizes.size(); ++t) {
      for (int64_t i = 0; i < sizes[t]; ++i) {
        S expected = convert<S>(convert<float>(added[t][i]) * static_cast<float>(t));
        expect_near(convert<float>(values[t][i]), convert<float>(expected), 0, "for_tensor");
      }
    }
  }
}

template <class S>
void run_all() {
  test_functors_of_tensors<S>({1, 0, 7, 0, 0, 64, 65, 200003, 0});
  test_functors_of_tensors<S>(std::vector<int64_t>(300, 5));
  test_functors_of_tensors<S>({0});
  test_functors_of_tensors<S>({});
}

}  // namespace

int main() {
  return test_each_storage([]<class S>() { run_all<S>(); });
}
