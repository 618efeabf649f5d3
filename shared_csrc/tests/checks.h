// What the engine tests share: a count of mismatches, threads, random values.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "apex/core/types.h"

using namespace apex;

namespace {

int failures = 0;

void expect_near(double actual, double expected, double tolerance, const std::string& what) {
  bool both_nan = std::isnan(actual) && std::isnan(expected);
  if (both_nan || std::abs(actual - expected) <= tolerance || actual == expected) return;
  std::printf("%s: expected %.9g, got %.9g\n", what.c_str(), expected, actual);
  ++failures;
}

// Threads of a fixed number, each with an equal share: what torch's parallel_for does.
struct Threads {
  int count;

  int threads() const { return count; }

  template <class F>
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) const {
    if (begin >= end) return;
    if (end - begin <= grain) return f(begin, end);
    std::vector<std::thread> pool;
    for (int t = 0; t < count; ++t) {
      int64_t from = begin + (end - begin) * t / count,
              to = begin + (end - begin) * (t + 1) / count;
      if (from < to) pool.emplace_back([&f, from, to] { f(from, to); });
    }
    for (std::thread& thread : pool) thread.join();
  }
};

// Exactly as long as asked for, so that AddressSanitizer sees the first element behind the end.
template <class S>
std::vector<S> random_values(int64_t count) {
  std::vector<S> values(count);
  for (S& value : values) value = convert<S>(std::rand() / float(RAND_MAX) - 0.5f);
  return values;
}

// What main() returns: calls test<S>() for the storage types, and says how many checks failed.
template <class F>
int test_each_storage(const F& test) {
  test.template operator()<float>();
  test.template operator()<Half>();
  test.template operator()<BFloat16>();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
