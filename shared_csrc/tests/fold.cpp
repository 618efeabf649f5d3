// Runs Row::fold, Row::at and rows with gaps on the CPU, with a program that keeps the largest
// element of each row, its column's digits and the sum; and Row::max where some elements are NaN.
// Exits non-zero with a line per mismatch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "apex/engine/rowwise.h"

using namespace apex;

namespace {

int failures = 0;

struct Serial {
  int threads() const { return 1; }
  template <class F>
  void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) const {
    f(begin, end);
  }
};

// State: largest |x|, the sign of that x, the number of elements. The second depends on the first,
// which no sum or maximum alone can do.
using State = Array<float, 3>;

template <class S>
struct Largest {
  using value_type = float;
  const S* x;
  int64_t stride;
  S* y;  // [rows, columns]: x, but the negative of it in column `changed`
  int64_t changed;
  State* states;  // [rows]

  template <class R>
  void row(R& row) const {
    auto values = row.in(x, stride);
    State state = row.template fold<3>(
        State{{-1, 0, 0}},
        [](State& s, float v) {
          float magnitude = v < 0 ? -v : v;
          s[1] = magnitude > s[0] ? (v < 0 ? -1.0f : 1.0f) : s[1];
          s[0] = magnitude > s[0] ? magnitude : s[0];
          s[2] += 1;
        },
        [](const State& a, const State& b) {
          return State{{a[0] > b[0] ? a[0] : b[0], a[0] > b[0] ? a[1] : b[1], a[2] + b[2]}};
        },
        values);
    row.each([](float& out, float v) { out = v; }, row.out(y), values);
    if (changed >= 0) {
      row.at(changed, [](float& out, float v) { out = -v; }, row.out(y), values);
    }
    row.once([&] { states[row.index()] = state; });
  }
};

void expect(double actual, double expected, const char* what, int64_t columns, int64_t column) {
  if (actual == expected) return;
  std::printf("%s, %lld columns, column %lld: expected %.9g, got %.9g\n", what,
              static_cast<long long>(columns), static_cast<long long>(column), expected, actual);
  ++failures;
}

template <class S>
void test_rows(int64_t rows, int64_t columns, int64_t gap, int64_t changed) {
  int64_t stride = columns + gap;
  // Exactly as long as needed, so that a sanitizer sees the first element behind the end.
  std::vector<S> x(rows == 0 ? 0 : (rows - 1) * stride + columns), y(rows * columns);
  for (S& value : x) value = convert<S>(std::rand() / float(RAND_MAX) - 0.5f);
  std::vector<State> states(rows);
  rowwise(Serial{}, rows, columns, Largest<S>{x.data(), stride, y.data(), changed, states.data()});
  for (int64_t row = 0; row < rows; ++row) {
    float largest = -1, sign = 0;
    for (int64_t column = 0; column < columns; ++column) {
      float value = convert<float>(x[row * stride + column]);
      float expected = column == changed ? -value : value;
      expect(convert<float>(y[row * columns + column]), expected, "each, at", columns, column);
      if (std::abs(value) > largest) largest = std::abs(value), sign = value < 0 ? -1 : 1;
    }
    expect(states[row][0], largest, "fold's largest", columns, row);
    // Two 16-bit numbers may be equal but for the sign; then either is right.
    if (sizeof(S) == 4) expect(states[row][1], sign, "fold's sign", columns, row);
    expect(states[row][2], columns, "fold's count", columns, row);
  }
}

template <class S>
struct Maxima {
  using value_type = float;
  const S* x;
  float* maxima;  // [rows]

  template <class R>
  void row(R& row) const {
    maxima[row.index()] = row.max([](float v) { return v; }, row.in(x));
  }
};

// In row r, every element is NaN whose column is no multiple of r + 1; in the last row, all are.
template <class S>
void test_max(int64_t columns) {
  constexpr int64_t kRows = 5;
  std::vector<S> x(kRows * columns);
  std::vector<float> maxima(kRows), expected(kRows, -std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const bool is_number = row + 1 < kRows && column % (row + 1) == 0;
      S& value = x[row * columns + column];
      value = convert<S>(is_number ? std::rand() / float(RAND_MAX) - 2 : NAN);
      if (is_number) expected[row] = std::fmax(expected[row], convert<float>(value));
    }
  }
  rowwise(Serial{}, kRows, columns, Maxima<S>{x.data(), maxima.data()});
  for (int64_t row = 0; row < kRows; ++row) {
    expect(maxima[row], expected[row], "max", columns, row);
  }
}

template <class S>
void test_all() {
  for (int64_t columns : {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 1000, 16384, 16385, 40000}) {
    for (int64_t gap : {0, 5}) {
      for (int64_t changed : {int64_t{-1}, int64_t{0}, columns / 2, columns - 1}) {
        test_rows<S>(3, columns, gap, changed < columns ? changed : -1);
      }
    }
    test_max<S>(columns);
  }
}

}  // namespace

int main() {
  test_all<float>();
  test_all<Half>();
  test_all<BFloat16>();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
