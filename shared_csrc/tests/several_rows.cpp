// Programs that take several rows at once on the CPU: the results are those of row by row.
#include "apex/engine/colwise.h"
#include "apex/engine/rowwise.h"
#include "checks.h"

namespace {

// y = x + shift, and the sums of each column of 2 x, which becomes a result, and of its squares.
template <class S, int kCount>
struct Shift {
  using value_type = float;
  static constexpr int kRowsAtOnce = kCount;
  static constexpr int kSums = 2;

  const S* x;          // [rows, columns]
  const float* shift;  // [columns]
  S* y;                // [rows, columns]
  float* sums;         // [2, columns]
  int64_t columns;

  template <class R>
  void row(R& row) const {
    row.each([](float& y, float shift, float x) { y = x + shift; }, row.out(y), row.shared(shift),
             row.in(x));
  }
  template <class R>
  void column_sums(R& row) const {
    row.template accumulate<kSums>(
        [](Array<float, 2>& sums, float& twice, float x, float shift) {
          twice = zero_where(x <= shift, 2 * x);
          sums[0] += twice;
          sums[1] += twice * (x - shift);
        },
        row.out(y), row.in(x), row.shared(shift));
  }
  void finish(int64_t column, const Array<float, 2>& both) const {
    sums[column] = both[0];
    sums[columns + column] = both[1];
  }
};

// Begins with a line of the cache, as results must that are written around it.
template <class S>
struct Matrix {
  explicit Matrix(int64_t count) : memory(count + 64), count(count) {
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    first = memory.data() + (64 - address % 64) % 64 / sizeof(S);
  }
  Matrix(Matrix&&) = default;

  std::vector<S> memory;
  int64_t count;
  S* first;
};

template <class S>
struct Results {
  Matrix<S> y, twice;
  Matrix<float> sums;
};

template <int kCount, class S>
Results<S> run(const Threads& context, int64_t rows, int64_t columns, const std::vector<S>& x,
               const std::vector<float>& shift) {
  const int64_t count = rows * columns;
  Results<S> results{Matrix<S>(count), Matrix<S>(count), Matrix<float>(2 * columns)};
  Shift<S, kCount> program{x.data(), shift.data(), results.y.first, results.sums.first, columns};
  rowwise(context, rows, columns, program);
  program.y = results.twice.first;
  colwise(context, rows, columns, program);
  return results;
}

template <class S>
void expect_same(const Matrix<S>& actual, const Matrix<S>& expected, double tolerance,
                 const std::string& what) {
  for (int64_t i = 0; i < expected.count; ++i) {
    expect_near(convert<float>(actual.first[i]), convert<float>(expected.first[i]), tolerance,
                what);
  }
}

template <class S>
void test(const Threads& context, int64_t rows, int64_t columns) {
  auto x = random_values<S>(rows * columns);
  auto shift = random_values<float>(columns);
  if (!x.empty()) x[x.size() / 2] = convert<S>(NAN);
  Results<S> alone = run<1>(context, rows, columns, x, shift);
  std::string where = std::to_string(rows) + "x" + std::to_string(columns);
  std::string one = "one row " + where;
  for (size_t i = 0; i < x.size(); ++i) {
    float expected = convert<float>(convert<S>(convert<float>(x[i]) + shift[i % columns]));
    expect_near(convert<float>(alone.y.first[i]), expected, 0, one);
  }
  auto compare = [&](const Results<S>& several, const std::string& count) {
    expect_same(several.y, alone.y, 0, count + " rows: each " + where);
    expect_same(several.twice, alone.twice, 0, count + " rows: accumulate " + where);
    // The last rows of a thread are merged apart.
    expect_same(several.sums, alone.sums, 1e-7 * (1 + rows), count + " rows: sums " + where);
  };
  compare(run<2>(context, rows, columns, x, shift), "2");
  compare(run<4>(context, rows, columns, x, shift), "4");
}

template <class S>
void test_all() {
  for (int threads : {1, 3}) {
    for (int64_t rows : {0, 1, 2, 3, 5, 33, 70}) {
      for (int64_t columns : {1, 63, 64, 65, 95, 200, 1024}) {
        test<S>(Threads{threads}, rows, columns);
      }
    }
#if defined(__AVX512F__)
    test<S>(Threads{threads}, 8501, 512);  // streamed, in 16 bits from 8 MiB on
    test<S>(Threads{threads}, 8501, 500);  // and rows that begin within a line of the cache
#endif
  }
}

}  // namespace

int main() {
  return test_each_storage([]<class S>() { test_all<S>(); });
}
