// Runs segment_sum and rowwise_segment_sum against loops in double; exits non-zero with a line per
// mismatch. On the CPU, or on the emulated GPU.
#include "apex/engine/segment_sum.h"

#include <memory>

#include "checks.h"

namespace {

#if defined(APEX_GPU)
// Memory that kernels may use, for as long as it lives.
struct Operand {
  Operand(void* data, size_t bytes, size_t element, const char* name, emulation::Content content)
      : data(data) {
    emulation::add_operand(data, bytes, element, name, content);
  }
  ~Operand() { emulation::release_operand(data); }
  Operand(const Operand&) = delete;
  void* data;
};

struct TestContext {
  explicit TestContext(int) : stream_(emulation::open_stream()) {}
  ~TestContext() { emulation::close_stream(); }
  gpu_stream stream() const { return stream_; }
  void check_launch(const char*) const {}
  void* workspace(size_t bytes) const {
    memory_.push_back(std::make_unique<double[]>(bytes / 8 + 2));
    // Aligned to 16 bytes, as what torch allocates.
    auto address = (reinterpret_cast<uintptr_t>(memory_.back().get()) + 15) / 16 * 16;
    auto* data = reinterpret_cast<void*>(address);
    operands_.push_back(
        std::make_unique<Operand>(data, bytes, 8, "workspace", emulation::Content::kFresh));
    return data;
  }

 private:
  gpu_stream stream_;
  mutable std::vector<std::unique_ptr<double[]>> memory_;
  mutable std::vector<std::unique_ptr<Operand>> operands_;
};
#else
struct TestContext : Threads {
  explicit TestContext(int threads) : Threads{threads} {}
  void* workspace(size_t bytes) const {
    memory_.emplace_back(bytes / 8 + 1, std::nan(""));
    return memory_.back().data();
  }

 private:
  mutable std::vector<std::vector<double>> memory_;
};
#endif

// Segments: the sum of x, of x * w, and how often there was one. Rows: y = x - w.
template <class S>
struct Sums {
  using value_type = float;
  using storage_type = S;
  static constexpr int kSums = 2;
  const S* x;
  const S* w;
  S* y;
  float* sums;
  float* products;

  template <class R>
  APEX_HD void row(R& row) const {
    row.each([](float& y, float x, float w) { y = x - w; }, row.out(y), row.in(x), row.in(w));
  }
  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<2>(
        [](Array<float, 2>& sums, float x, float w) {
          sums[0] += x;
          sums[1] += x * w;
        },
        row.in(x), row.in(w));
  }
  template <class R, class V>
  APEX_HD void finish(R& row, const V& results) const {
    row.each(
        [](float& sum, float& product, float a, float b) {
          sum = a;
          product = b;
        },
        row.out(sums), row.out(products), results[0], results[1]);
  }
};

// The sums of x alone, which are results as they are.
template <class S>
struct SumsAsResults : Sums<S> {
  static constexpr int kSums = 1;

  template <class R>
  APEX_HD void column_sums(R& row) const {
    row.template accumulate<1>([](Array<float, 1>& sums, float x) { sums[0] += x; },
                               row.in(this->x));
  }
  template <class R, class V>
  APEX_HD void finish(R& row, const V& results) const {
    row.each([](float& sum, float a) { sum = a; }, row.out(this->sums), results[0]);
  }
  float* sums_as_results() const { return this->sums; }
};

struct Lookup {
  const int64_t* segments;
  APEX_HD int64_t operator()(int64_t row) const { return segments[row]; }
};

template <class S>
void test(int threads, std::vector<int64_t> keys, int64_t count, int64_t columns) {
  const auto rows = static_cast<int64_t>(keys.size());
  auto x = random_values<S>(rows * columns), w = random_values<S>(rows * columns);
  std::vector<S> y(rows * columns);
  std::vector<float> sums(count * columns, -1), products(count * columns, -1), first;
  Sums<S> program{x.data(), w.data(), y.data(), sums.data(), products.data()};
  std::string where = std::to_string(rows) + "x" + std::to_string(columns) + " in " +
                      std::to_string(count) + " segments";
  // Sums; rows and sums; both as operators call them, which may leave out the sort, by as many
  // threads and by one; and the same of sums that are results.
  // A GPU also sorts few rows by digits: in one tile of them, in several, and by int64.
  enum Mode {
    kSumsAlone,
    kSorted,
    kInTiles,
    kWide,
    kCalled,
    kCalledByOne,
    kResults,
    kResultsByOne
  };
#if defined(APEX_GPU)
  static constexpr Mode modes[] = {kSumsAlone, kSorted, kInTiles, kWide, kCalled, kResults};
#else
  static constexpr Mode modes[] = {kSumsAlone,   kSorted,  kCalled,
                                   kCalledByOne, kResults, kResultsByOne};
#endif
  for (Mode mode : modes) {
    const bool has_products = mode < kResults;
    {
#if defined(APEX_GPU)
      using emulation::Content;
      auto lend = [](auto& values, const char* name, Content content) {
        using V = std::decay_t<decltype(values[0])>;
        return std::make_unique<Operand>(values.data(), values.size() * sizeof(V), sizeof(V), name,
                                         content);
      };
      auto lent = {
          lend(keys, "keys", Content::kValues), lend(x, "x", Content::kValues),
          lend(w, "w", Content::kValues),       lend(y, "y", Content::kFresh),
          lend(sums, "sums", Content::kFresh),  lend(products, "products", Content::kFresh)};
      (void)lent;
#endif
      TestContext context(mode == kCalledByOne || mode == kResultsByOne ? 1 : threads);
      const Lookup lookup{keys.data()};
      if (mode == kSumsAlone) {
        segment_sum(context, group_rows(context, rows, count, lookup), columns, program);
      } else if (mode == kSorted) {
        rowwise_segment_sum(context, group_rows(context, rows, count, lookup), columns, program);
#if defined(APEX_GPU)
      } else if (mode == kInTiles) {
        auto segments = sort_rows<int32_t>(context, rows, count, lookup, 2);
        rowwise_segment_sum(context, segments, columns, program);
      } else if (mode == kWide) {
        auto segments = sort_rows<int64_t>(context, rows, count, lookup, 2);
        rowwise_segment_sum(context, segments, columns, program);
#endif
      } else if (has_products) {
        rowwise_segment_sum(context, rows, columns, count, lookup, true, program);
      } else {
        const SumsAsResults<S> results{program};
        rowwise_segment_sum(context, rows, columns, count, lookup, true, results);
      }
    }
    std::vector<double> expected(2 * count * columns);
    std::vector<int64_t> sizes(count);
    for (int64_t r = 0; r < rows; ++r) {
      int64_t segment = keys[r];
      for (int64_t c = 0; c < columns; ++c) {
        int64_t i = r * columns + c;
        double a = convert<float>(x[i]), b = convert<float>(w[i]);
        double unit = sizeof(S) == 2 ? 0.01 : 1e-6;
        if (mode != kSumsAlone) expect_near(convert<float>(y[i]), a - b, unit, "row of " + where);
        if (segment < 0 || segment >= count) continue;
        expected[segment * columns + c] += a;
        expected[(count + segment) * columns + c] += a * b;
      }
      if (segment >= 0 && segment < count) ++sizes[segment];
    }
    for (int64_t i = 0; i < count * columns; ++i) {
      double unit = 1e-6 * (1 + std::sqrt(double(sizes[i / columns])));
      expect_near(sums[i], expected[i], unit, "sum of " + where);
      double product = has_products ? expected[count * columns + i] : -1;
      expect_near(products[i], product, unit, "product of " + where);
    }
    if (mode == kSumsAlone || mode == kCalled || mode == kResults) first = sums;
    // Bits depend on neither the order of the work nor on who does it.
    for (size_t i = 0; i < first.size(); ++i) expect_near(sums[i], first[i], 0, "bits of " + where);
    std::fill(sums.begin(), sums.end(), -1.0f);
    std::fill(products.begin(), products.end(), -1.0f);
    std::fill(y.begin(), y.end(), convert<S>(-1.0f));
  }
}

std::vector<int64_t> random_keys(int64_t rows, int64_t low, int64_t high) {
  std::vector<int64_t> keys(rows);
  for (int64_t& key : keys) key = low + std::rand() % (high - low);
  return keys;
}

template <class S>
void test_all() {
#if defined(APEX_GPU)
  const std::vector<int> threads{1};
  const std::vector<int64_t> widths{1, 8, 19};
  const int64_t many = 1500;
#else
  const std::vector<int> threads{1, 3};
  const std::vector<int64_t> widths{1, 16, 17, 64, 65, 331};
  const int64_t many = 5000;
#endif
  for (int t : threads) {
    for (int64_t columns : widths) {
      test<S>(t, {}, 0, columns);
      test<S>(t, {}, 3, columns);
      test<S>(t, {2}, 3, columns);
      test<S>(t, {7, -1, 5, 0}, 0, columns);               // no segment at all
      test<S>(t, random_keys(40, 0, 70), 70, columns);     // many without a row
      test<S>(t, random_keys(300, -3, 8), 5, columns);     // rows of none
      test<S>(t, random_keys(many, 0, 1), 1, columns);     // one of many tiles
      test<S>(t, random_keys(many, 1, 4), 4, columns);     // some, and an empty one
      test<S>(t, random_keys(many, -1, 20), 17, columns);  // few, each a small share of all rows
    }
    test<S>(t, random_keys(many, 0, 70'000), 70'000, 1);  // three digits
    test<S>(t, random_keys(4500, -2, 1000), 1000, 1);     // more than a GPU ranks
    test<S>(t, random_keys(4500, 9, 10), 10, 2);          // all of one
    test<S>(t, random_keys(10, 0, 3), 3, 0);
  }
}

}  // namespace

int main() {
  return test_each_storage([]<class S>() { test_all<S>(); });
}
