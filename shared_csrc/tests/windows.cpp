// Rows seen through a window, rows at addresses of their own, several runs of the same columns,
// sums that write, and terms that are kept, on the CPU, against plain loops; exits non-zero with a
// line per mismatch.
#include "apex/engine/rowwise.h"
#include "checks.h"

namespace {

// y = x / sum(x) over columns [begin, end) of row `rows - 1 - index`, and -1 elsewhere.
template <class S>
struct Share {
  using value_type = compute_t<S>;
  const S* x;
  S *y, *twice;
  value_type* sums;
  int64_t rows, begin, end;

  template <class R>
  void row(R& row) const {
    using T = value_type;
    const int64_t other = (rows - 1 - row.index()) * row.columns();
    const auto window = row.within(begin, end);
    const T sum = window.sum([](T& y, T x) { return y = 2 * x, x; }, window.out(twice),
                             window.from(x + other));
    const T largest = window.max([](T x) { return x; }, window.from(x + other));
    window.each([=](T& y, T x) { y = x / sum + 0 * largest; },
                window.to(y + row.index() * row.columns()), window.from(x + other));
    for (const auto& rest : {row.within(0, begin), row.within(end, row.columns())}) {
      rest.each([](T& y, T& twice) { y = twice = T(-1); }, rest.out(y), rest.out(twice));
    }
    row.once([&] { sums[row.index()] = sum; });
  }
};

template <class S>
void test_window(const Threads& context, int64_t columns, int64_t begin, int64_t end) {
  using T = compute_t<S>;
  const int64_t rows = 5;
  auto x = random_values<S>(rows * columns), y = random_values<S>(rows * columns),
       twice = random_values<S>(rows * columns);
  for (S& value : x) value = convert<S>(convert<T>(value) + T(0.6));
  std::vector<T> sums(rows);
  rowwise(context, rows, columns,
          Share<S>{x.data(), y.data(), twice.data(), sums.data(), rows, begin, end});
  std::string where =
      std::to_string(columns) + " [" + std::to_string(begin) + ", " + std::to_string(end) + ")";
  for (int64_t r = 0; r < rows; ++r) {
    const S* own = x.data() + (rows - 1 - r) * columns;
    double sum = 0;
    for (int64_t c = begin; c < end; ++c) sum += convert<T>(own[c]);
    expect_near(sums[r], sum, 1e-5 * (1 + sum), "sum " + where);
    for (int64_t c = 0; c < columns; ++c) {
      const bool inside = c >= begin && c < end;
      const double value = convert<T>(own[c]);
      const double unit = sizeof(S) == 2 ? 0.01 : 1e-5;
      expect_near(convert<T>(y[r * columns + c]), inside ? value / sum : -1, unit, "y " + where);
      expect_near(convert<T>(twice[r * columns + c]), inside ? 2 * value : -1, unit,
                  "written by a sum " + where);
    }
  }
}

// y = x * scale in columns [begin, end) of every run of a row; runs have gaps between them.
template <class S, class W>
struct ScaleRuns {
  using value_type = compute_t<S>;
  const S* x;
  const W* scale;
  S* y;
  int64_t runs, gap, begin, end;

  template <class R>
  void row(R& row) const {
    using T = value_type;
    const int64_t stride = row.columns() + gap, first = row.index() * runs * stride;
    const auto window = row.within(begin, end);
    window.each_of(
        runs, [](T& y, T x, T scale) { y = x * scale; }, window.to(y + first, stride),
        window.from(x + first, stride), window.shared(scale));
  }
};

template <class S, class W>
void test_runs(const Threads& context, int64_t columns, int64_t begin, int64_t end, int64_t runs) {
  using T = compute_t<S>;
  constexpr int64_t kRows = 3, kGap = 5;
  const int64_t stride = columns + kGap, count = kRows * runs * stride;
  auto x = random_values<S>(count), y = random_values<S>(count);
  const auto before = y;
  const auto scale = random_values<W>(columns);
  rowwise(context, kRows, columns,
          ScaleRuns<S, W>{x.data(), scale.data(), y.data(), runs, kGap, begin, end});
  const std::string where = std::to_string(runs) + " runs of " + std::to_string(columns) + " [" +
                            std::to_string(begin) + ", " + std::to_string(end) + ")";
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = i % stride;
    const bool inside = c >= begin && c < end;
    const T product = inside ? convert<T>(x[i]) * convert<T>(scale[c]) : T(0);
    expect_near(convert<T>(y[i]), convert<T>(inside ? convert<S>(product) : before[i]), 0, where);
  }
}

template <class S>
void test_all_runs() {
  for (int64_t columns : {1, 15, 16, 31, 32, 33, 64, 100}) {
    for (int64_t begin : {0, 1}) {
      for (int64_t runs : {0, 1, 15, 16, 17, 40}) {
        test_runs<S, S>({2}, columns, begin, columns, runs);
        if constexpr (sizeof(S) == 2) test_runs<S, float>({2}, columns, begin, columns, runs);
      }
    }
  }
}

// Runs of a result so large that whole lines of it are written around the cache, and some that are
// not whole lines; at an address that is a multiple of a line, and at one that is none.
template <class S>
void test_large_runs() {
  using T = compute_t<S>;
  constexpr int64_t kColumns = 8192 / sizeof(S), kRuns = 2, kLine = 64 / sizeof(S);
  const int64_t rows = kStreamedBytes / (kColumns * sizeof(S)) + 1, count = rows * kRuns * kColumns;
  const auto x = random_values<S>(count), scale = random_values<S>(kColumns);
  std::vector<S> memory(count + 2 * kLine);
  S* lines = memory.data();
  while (reinterpret_cast<uintptr_t>(lines) % 64 != 0) ++lines;
  for (S* y : {lines, lines + 1}) {
    for (int64_t end : {kColumns, kColumns - kLine - 1}) {
      std::fill(memory.begin(), memory.end(), S{});
      rowwise(Threads{2}, rows, kColumns,
              ScaleRuns<S, S>{x.data(), scale.data(), y, kRuns, 0, 0, end});
      const std::string where = "large runs to " + std::to_string(end);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t c = i % kColumns;
        const T product = c < end ? convert<T>(x[i]) * convert<T>(scale[c]) : T(0);
        expect_near(convert<T>(y[i]), convert<T>(convert<S>(product)), 0, where);
      }
      expect_near(convert<T>(y[count]), 0, 0, "behind " + where);
    }
  }
}

// y = (x + 1) / sum(x + 1) over columns [begin, end) of a row, by terms that are kept; sum is that
// sum in the same columns, and twice is 2 * x.
template <class S>
struct ShareOfTerms {
  using value_type = compute_t<S>;
#if !defined(WITHOUT_TERMS)  // else it must not compile
  static constexpr bool kKeepsTerms = true;
#endif
  const S* x;
  S *y, *sums, *twice;
  int64_t begin, end;

  template <class R>
  void row(R& row) const {
    using T = value_type;
    const auto window = row.within(begin, end);
    auto use = [&](T sum, const auto& each_term) {
      each_term([sum](T& y, T term) { y = term / sum; }, window.out(y));
      each_term([sum](T& whole, T& twice, T x, T) { whole = sum, twice = 2 * x; }, window.out(sums),
                window.out(twice), window.in(x));
    };
    window.with_terms([](T x) { return x + 1; }, use, window.in(x));
  }
};

template <class S>
void test_terms(int64_t columns, int64_t begin, int64_t end) {
  using T = compute_t<S>;
  const int64_t rows = 7;
  const auto x = random_values<S>(rows * columns);
  std::vector<S> y(x.size()), sums(x.size()), twice(x.size());
  rowwise(Threads{2}, rows, columns,
          ShareOfTerms<S>{x.data(), y.data(), sums.data(), twice.data(), begin, end});
  const std::string where = "terms of " + std::to_string(columns) + " [" + std::to_string(begin) +
                            ", " + std::to_string(end) + ")";
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t c = begin; c < end; ++c) sum += convert<T>(x[r * columns + c]) + 1;
    const double unit = sizeof(S) == 2 ? 0.01 : 1e-5;
    for (int64_t i = r * columns, c = 0; c < columns; ++c, ++i) {
      const bool inside = c >= begin && c < end;
      const double value = convert<T>(x[i]);
      expect_near(convert<T>(y[i]), inside ? (value + 1) / sum : 0, unit, "share, " + where);
      expect_near(convert<T>(sums[i]), inside ? sum : 0, unit * sum, "sum, " + where);
      expect_near(convert<T>(twice[i]), inside ? 2 * value : 0, unit, "beside, " + where);
    }
  }
}

template <class S>
void test_all() {
  test_all_runs<S>();
  for (int64_t columns : {1, 16, 63, 64, 65, 200}) {
    for (int64_t begin : {0, 1, 64}) {
      if (begin <= columns) test_terms<S>(columns, begin, columns);
    }
  }
  test_large_runs<S>();
  for (int threads : {1, 3}) {
    for (int64_t columns : {1, 16, 63, 64, 65, 200}) {
      for (int64_t begin : {0, 1, 17, 64}) {
        for (int64_t end : {1, 16, 18, 33, 63, 64, 129, 200}) {
          if (begin <= end && end <= columns) test_window<S>({threads}, columns, begin, end);
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_all<float>();
  test_all<double>();
  test_all<Half>();
  test_all<BFloat16>();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
