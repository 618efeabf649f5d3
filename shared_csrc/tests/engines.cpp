// Runs every engine on the CPU with trivial functors, against loops in double; exits non-zero with
// a line per mismatch. Compiled per ISA level and with sanitizers by test_engines.py.
#include "apex/engine/colwise.h"
#include "apex/engine/foreach.h"
#include "apex/engine/foreach_reduce.h"
#include "apex/engine/rowwise.h"
#include "checks.h"

namespace {

struct MultiplyAdd {
  using value_type = float;
  float factor;
  int* flag;
  int operator()(float& out, float& in) const {
    out += factor * in;
    return in > 0.49f;
  }
};

template <class S>
void test_foreach(const Threads& context, const std::vector<int64_t>& sizes) {
  std::vector<std::vector<S>> outs, ins;
  TensorTable table;
  table.columns = 2;
  for (int64_t size : sizes) {
    outs.push_back(random_values<S>(size));
    ins.push_back(random_values<S>(size));
  }
  auto before = outs;
  for (size_t t = 0; t < sizes.size(); ++t) {
    if (sizes[t] == 0) continue;
    table.data.push_back(outs[t].data());
    table.data.push_back(ins[t].data());
    table.numel.push_back(sizes[t]);
  }
  int flag = 0;
  bool expected_flag = false;
  foreach<InOut<S>, In<S>>(context, table, MultiplyAdd{3.0f, &flag});
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (int64_t i = 0; i < sizes[t]; ++i) {
      float in = convert<float>(ins[t][i]);
      expected_flag = expected_flag || in > 0.49f;
      float exact = convert<float>(before[t][i]) + 3.0f * in;
      float expected = convert<float>(convert<S>(exact));
      // One unit in the last place: the product may be fused into the sum, or not.
      double unit = sizeof(S) == 2 ? 0.01 : 1e-6;
      expect_near(convert<float>(outs[t][i]), expected, unit, "foreach " + std::to_string(i));
    }
  }
  expect_near(flag, expected_flag, 0, "foreach flag");
}

struct SumOfSquares {
  using value_type = float;
  float operator()(float x) const { return x * x; }
  template <class T>
  static T combine(T a, T b) {
    return a + b;
  }
  double finish(double x) const { return std::sqrt(x); }
};

template <class S>
void test_foreach_reduce(const std::vector<int64_t>& sizes) {
  std::vector<std::vector<S>> values;
  TensorTable table;
  table.columns = 1;
  double all = 0;
  std::vector<double> squares;
  for (int64_t size : sizes) values.push_back(random_values<S>(size));
  for (auto& tensor : values) {
    double sum = 0;
    for (S x : tensor) sum += std::pow(convert<float>(x), 2);
    squares.push_back(sum);
    all += sum;
    table.data.push_back(tensor.data());
    table.numel.push_back(tensor.size());
  }
  float first_total = 0;
  for (int threads : {1, 2, 3}) {
    std::vector<float> norms(sizes.size(), -1);
    float total = -1;
    foreach_reduce<S>(Threads{threads}, table, SumOfSquares{}, norms.data(), &total);
    for (size_t t = 0; t < sizes.size(); ++t) {
      double expected = std::sqrt(squares[t]);
      expect_near(norms[t], expected, 1e-5 * expected, "foreach_reduce tensor");
    }
    expect_near(total, std::sqrt(all), 1e-5 * std::sqrt(all), "foreach_reduce total");
    if (threads == 1) first_total = total;
    expect_near(total, first_total, 0, "foreach_reduce depends on the number of threads");
  }
}

// Row: y = (x - max) / sum(x - max); columns: the sum of x and the number of rows, and -x.
template <class S>
struct Normalize {
  using value_type = float;
  using staged_type = S;
  static constexpr int kSums = 2;
  const S* x;
  S* y;
  float* largest;
  float* column_sum;
  float* column_count;
  S* negated;

  template <class R>
  void row(R& row) const {
    auto values = row.stage(x);
    float high = row.max([](float v) { return v; }, values);
    auto both =
        row.template sums<2>([=](float v) { return Array<float, 2>{{v - high, 1.0f}}; }, values);
    float scale = both[0] == 0 ? 1.0f : 1 / both[0];
    expect_near(both[1], row.columns(), 0, "rowwise count");
    row.each([=](float& out, float v) { out = (v - high) * scale; }, row.out(y), values);
    row.once([&] { largest[row.index()] = high; });
  }

  template <class R>
  void column_sums(R& row) const {
    row.template accumulate<2>(
        [](Array<float, 2>& sums, float& out, float v) {
          out = -v;
          sums[0] += v;
          sums[1] += 1;
        },
        row.out(negated), row.in(x));
  }

  void finish(int64_t column, const Array<float, 2>& sums) const {
    column_sum[column] = sums[0];
    column_count[column] = sums[1];
  }
};

template <class S>
void test_matrix(const Threads& context, int64_t rows, int64_t columns) {
  auto x = random_values<S>(rows * columns);
  std::vector<S> y(rows * columns), negated(rows * columns);
  std::vector<float> largest(rows), sums(columns, -1), counts(columns, -1);
  Normalize<S> program{x.data(),    y.data(),      largest.data(),
                       sums.data(), counts.data(), negated.data()};
  rowwise_colwise(context, rows, columns, program);
  std::string where = std::to_string(rows) + "x" + std::to_string(columns);
  for (int64_t r = 0; r < rows; ++r) {
    double high = -INFINITY, sum = 0;
    for (int64_t c = 0; c < columns; ++c) {
      high = std::max<double>(high, convert<float>(x[r * columns + c]));
    }
    for (int64_t c = 0; c < columns; ++c) sum += convert<float>(x[r * columns + c]) - high;
    if (columns > 0) expect_near(largest[r], high, 0, "rowwise max " + where);
    for (int64_t c = 0; c < columns; ++c) {
      double expected = (convert<float>(x[r * columns + c]) - high) / (sum == 0 ? 1 : sum);
      double unit = sizeof(S) == 2 ? 0.01 : 1e-5;
      expect_near(convert<float>(y[r * columns + c]), expected, unit, "rowwise each " + where);
    }
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t c = 0; c < columns; ++c) {
      double expected = 0;
      for (int64_t r = 0; r < rows; ++r) expected += convert<float>(x[r * columns + c]);
      expect_near(sums[c], expected, 1e-5 * (1 + rows), "colwise sum " + where);
      expect_near(counts[c], rows, 0, "colwise count " + where);
    }
    for (int64_t i = 0; i < rows * columns; ++i) {
      expect_near(convert<float>(negated[i]), -convert<float>(x[i]), 0, "colwise each " + where);
    }
    std::fill(negated.begin(), negated.end(), S{});
    std::fill(sums.begin(), sums.end(), -1.0f);
    std::fill(counts.begin(), counts.end(), -1.0f);
    colwise(context, rows, columns, program);  // the second round checks it alone
  }
}

template <class S>
void test_conversions() {
  for (float value : {0.0f, -0.0f, 1.0f, 65504.0f, 1e-7f, -3.14159f, 3e38f, INFINITY, -INFINITY}) {
    float once = convert<float>(convert<S>(value));
    expect_near(convert<float>(convert<S>(once)), once, 0, "conversion is not idempotent");
    expect_near(std::signbit(once), std::signbit(value), 0, "conversion loses the sign");
  }
  expect_near(convert<float>(convert<S>(NAN)), NAN, 0, "conversion loses NaN");
}

template <class S>
void test_all() {
  test_conversions<S>();
  for (int threads : {1, 3}) {
    Threads context{threads};
    test_foreach<S>(context, {1, 7, 0, 64, 65, 1023});
    test_foreach<S>(context, {50003, 3});
    test_foreach<S>(context, std::vector<int64_t>(100, 3));
    test_foreach<S>(context, {});
    for (int64_t rows : {0, 1, 130}) {
      for (int64_t columns : {1, 2, 15, 16, 17, 63, 64, 65, 95, 331})
        test_matrix<S>(context, rows, columns);
    }
    test_matrix<S>(context, 3, 0);
  }
  test_foreach_reduce<S>({1, 7, 63, 64, 65, 200003});
  test_foreach_reduce<S>(std::vector<int64_t>(300, 5));
}

}  // namespace

int main() {
  return test_each_storage([]<class S>() { test_all<S>(); });
}
