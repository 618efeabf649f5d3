// Runs colwise_rowwise on the CPU: every column loses its sample's mean, found around a number that
// is made before; exits non-zero with a line per mismatch. Compiled as test_engines.py says.
#include <cstring>

#include "apex/engine/colwise_rowwise.h"
#include "checks.h"

namespace {

template <class S>
struct Center {
  using value_type = float;
  static constexpr int kSums = 1;
  const S* x;
  S* y;
  float *first, *mean;  // [samples, columns]
  int64_t rows, columns;

  Center of_sample(int64_t sample) const {
    Center own = *this;
    own.first += sample * columns;
    own.mean += sample * columns;
    return own;
  }
  template <class G>
  void before(G& group) const {
    const S* row = x + group.index() * rows * columns;
    group.each(0, columns, [&](int64_t column) { first[column] = convert<float>(row[column]); });
  }
  template <class R>
  void column_sums(R& row) const {
    const float* origin = first;
    row.template accumulate<1>(
        [](Array<float, 1>& sums, float x, float first) { sums[0] += x - first; }, row.in(x),
        row.shared(origin));
  }
  template <class G, class Sums>
  void between(G& group, const Sums& sums) const {
    group.each(0, columns, [&](int64_t column) {
      mean[column] = static_cast<float>(first[column] + sums(column)[0] / double(rows));
    });
  }
  template <class R>
  void row(R& row) const {
    const float* of_column = mean;
    row.each([](float& y, float x, float mean) { y = x - mean; }, row.out(y), row.in(x),
             row.shared(of_column));
  }
};

template <class S>
std::vector<S> test_samples(const Threads& context, int64_t samples, int64_t rows, int64_t columns,
                            const std::vector<S>& x) {
  std::vector<S> y(x.size());
  std::vector<float> first(samples * columns), mean(samples * columns);
  colwise_rowwise(context, samples, rows, columns,
                  Center<S>{x.data(), y.data(), first.data(), mean.data(), rows, columns});
  std::string where =
      std::to_string(samples) + "x" + std::to_string(rows) + "x" + std::to_string(columns);
  for (int64_t sample = 0; sample < samples; ++sample) {
    for (int64_t column = 0; column < columns; ++column) {
      auto at = [&](int64_t row) { return (sample * rows + row) * columns + column; };
      double sum = 0;
      for (int64_t row = 0; row < rows; ++row) sum += convert<float>(x[at(row)]);
      for (int64_t row = 0; row < rows; ++row) {
        double expected = convert<float>(x[at(row)]) - sum / static_cast<double>(rows);
        double unit = sizeof(S) == 2 ? 0.01 : 1e-6;
        expect_near(convert<float>(y[at(row)]), expected, unit, "centered " + where);
      }
    }
  }
  return y;
}

// What matters to threads: fewer samples than threads, several rounds, several parts of a sample.
template <class S>
void test_all() {
  for (int64_t samples : {0, 1, 2, 3, 13}) {
    for (int64_t rows : {0, 1, 45, 1200}) {
      for (int64_t columns : {1, 17, 64, 95}) {
        std::vector<S> x = random_values<S>(samples * rows * columns);
        auto y = test_samples(Threads{1}, samples, rows, columns, x);
        for (int threads : {2, 3}) {
          auto again = test_samples(Threads{threads}, samples, rows, columns, x);
          bool is_same = y.empty() || !memcmp(y.data(), again.data(), y.size() * sizeof(S));
          expect_near(is_same, true, 0, "threads change bits");
        }
      }
    }
  }
}

}  // namespace

int main() {
  return test_each_storage([]<class S>() { test_all<S>(); });
}
