// Runs colwise_rowwise on the CPU: every group of columns loses its mean in a sample, found around
// numbers that are made before; exits non-zero with a line per mismatch. Compiled as
// test_engines.py says.
#include <cstring>

#include "apex/engine/colwise_rowwise.h"
#include "checks.h"

namespace {

template <class S>
struct Center {
  using matrix_type = S;
  using value_type = float;
  static constexpr int kSums = 1, kVectors = 2, kBefore = 1;
  const S* x;
  S* y;
  float* mean;  // [samples, groups]
  int64_t rows, columns, width;
  ColumnVectors<float> vectors{};  // an origin, and the mean of the group
  const S* first = nullptr;

  int64_t group_columns() const { return width; }
  Center of_sample(int64_t sample) const {
    Center own = *this;
    own.first = x + sample * rows * columns;
    own.mean += sample * (columns / width);
    return own;
  }
  Array<float, 1> before(int64_t column) const { return {convert<float>(first[column])}; }
  template <class R>
  void column_sums(R& row) const {
    row.template accumulate<1>(
        [](Array<float, 1>& sums, float x, float first) { sums[0] += x - first; }, row.in(x),
        row.shared(vectors[0]));
  }
  template <class Team, class Matrix>
  Array<double, 2> statistics(const Team& team, int64_t group, const Matrix& matrix) const {
    const auto total = team.template sum<1>(group * width, (group + 1) * width, [&](int64_t c) {
      return Array<double, 1>{matrix.before(c)[0] + matrix.sums(c)[0] / double(rows)};
    });
    return {total[0] / double(width), 0};
  }
  template <class Team, class Matrix>
  void keep(const Team& team, int64_t group, const Array<double, 2>& of_group,
            const Matrix&) const {
    team.once([&] { mean[group] = static_cast<float>(of_group[0]); });
  }
  Array<float, 1> after(int64_t, const Array<float, 1>&, const Array<double, 2>& of_group) const {
    return {static_cast<float>(of_group[0])};
  }
  template <class R>
  void row(R& row) const {
    row.each([](float& y, float x, float mean) { y = x - mean; }, row.out(y), row.in(x),
             row.shared(vectors[1]));
  }
};

template <class S>
std::vector<S> test_samples(const Threads& context, int64_t samples, int64_t rows, int64_t columns,
                            int64_t width, const std::vector<S>& x) {
  std::vector<S> y(x.size());
  std::vector<float> mean(samples * (columns / width));
  colwise_rowwise(context, samples, rows, columns,
                  Center<S>{x.data(), y.data(), mean.data(), rows, columns, width});
  std::string where =
      std::to_string(samples) + "x" + std::to_string(rows) + "x" + std::to_string(columns);
  for (int64_t sample = 0; sample < samples; ++sample) {
    for (int64_t column = 0; column < columns; ++column) {
      auto at = [&](int64_t row) { return (sample * rows + row) * columns + column; };
      double sum = 0;
      const int64_t group = column / width;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = group * width; c < (group + 1) * width; ++c) {
          sum += convert<float>(x[(sample * rows + row) * columns + c]);
        }
      }
      const double expected_mean = sum / static_cast<double>(rows * width);
      if (rows > 0)
        expect_near(mean[sample * (columns / width) + group], expected_mean, 1e-6, where);
      for (int64_t row = 0; row < rows; ++row) {
        double expected = convert<float>(x[at(row)]) - expected_mean;
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
        const int64_t width = columns == 64 ? 16 : columns == 95 ? 5 : columns;
        auto y = test_samples(Threads{1}, samples, rows, columns, width, x);
        for (int threads : {2, 3}) {
          auto again = test_samples(Threads{threads}, samples, rows, columns, width, x);
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
