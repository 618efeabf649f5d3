// What the operators of batch normalization have in common: vectors with a number for each channel,
// and the statistics of a batch. `Stored<T>` are those that kernels store, in this order: mean,
// variance, and if given inv_std, eps, running_mean, running_var, momentum, count and its value,
// and num_batches.
#pragma once

#include <optional>
#include <tuple>

#include "apex/torch/dispatch.h"
#include "apex/torch/like.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// An operator's input, and how many channels it has.
struct Channels {
  const char* op;
  const Tensor& x;
  const char* name_of_x;
  int64_t channels;

  Tensor statistics(int64_t numel) const { return empty(x, {numel}, statistics_dtype(x)); }
  Tensor per_channel() const { return statistics(channels); }

  void check_operand(const char* name, const Tensor& tensor, int64_t numel,
                     ScalarType dtype) const {
    check_like(op, {name, tensor}, numel, dtype, {name_of_x, x});
  }
  void check_like_input(const NamedTensor& given) const {
    check_sizes(op, given, x.sizes(), x.scalar_type(), {name_of_x, x});
  }
  void check_counts(const Tensor& count, int64_t numel) const {
    check_operand("count", count, numel, ScalarType::Long);
#if defined(APEX_CPU)  // a GPU would have to be waited for
    const int64_t* numbers = data<int64_t>(count, "count");
    for (int64_t i = 0; i < numel; ++i) {
      check(numbers[i] >= 0, op, ": count[", i, "] must not be negative, got ", numbers[i], ".");
    }
#endif
  }

  // A vector's memory.
  template <class T>
  T* vector(const char* name, const Tensor& tensor) const {
    check_operand(name, tensor, channels, statistics_dtype(x));
    return data<T>(tensor, name);
  }
  // The same of one that is written to; null without it.
  template <class T>
  T* written(const char* name, const std::optional<Tensor>& tensor) const {
    if (!tensor) return nullptr;
    T* memory = vector<T>(name, *tensor);
    check_apart(op, {name, tensor}, {name_of_x, x});
    return memory;
  }
};

// Mean and biased variance. moments(results) fills results(T()), which is a Stored<T>.
template <template <class> class Stored, class Moments>
std::tuple<Tensor, Tensor> mean_and_variance(const Channels& of, const Moments& moments) {
  Tensor mean = of.per_channel(), variance = of.per_channel();
  moments(
      [&]<class T>(T) { return Stored<T>{data<T>(mean, "mean"), data<T>(variance, "variance")}; });
  return {mean, variance};
}

// Mean, unbiased variance, inverse standard deviation and the count, and the running ones updated.
// num_batches gets one more.
template <template <class> class Stored, class Moments>
std::tuple<Tensor, Tensor, Tensor, Tensor> all_statistics(const Channels& of, int64_t elements,
                                                          const std::optional<Tensor>& running_mean,
                                                          const std::optional<Tensor>& running_var,
                                                          const std::optional<Tensor>& num_batches,
                                                          double eps, double momentum,
                                                          const Moments& moments) {
  const NamedTensor x{of.name_of_x, of.x}, number{"num_batches", num_batches};
  check_apart(of.op, {"running_mean", running_mean}, {"running_var", running_var});
  check_like(of.op, number, 1, ScalarType::Long, x);
  for (const NamedTensor& other :
       {x, NamedTensor{"running_mean", running_mean}, NamedTensor{"running_var", running_var}}) {
    check_apart(of.op, number, other);
  }
  Tensor mean = of.per_channel(), variance = of.per_channel(), inv_std = of.per_channel();
  Tensor count = empty(of.x, {1}, ScalarType::Long);
  moments([&]<class T>(T) {
    return Stored<T>{data<T>(mean, "mean"),
                     data<T>(variance, "variance"),
                     data<T>(inv_std, "inv_std"),
                     eps,
                     of.written<T>("running_mean", running_mean),
                     of.written<T>("running_var", running_var),
                     momentum,
                     data<int64_t>(count, "count"),
                     elements,
                     num_batches ? data<int64_t>(*num_batches, "num_batches") : nullptr};
  });
  return {mean, variance, inv_std, count};
}

// The same of parts, such as ranks: `of` are their means [parts, channels], which
// merge(parts, means, biased variances, counts, Stored) merges.
template <template <class> class Stored, class Merge>
std::tuple<Tensor, Tensor, Tensor> merged_statistics(const Channels& of, const Tensor& biased_var,
                                                     const Tensor& count, double eps,
                                                     const Merge& merge) {
  const bool is_double = of.x.scalar_type() == ScalarType::Double;
  check(is_double || of.x.scalar_type() == ScalarType::Float, of.op,
        ": mean must be float32 or float64, got ", describe(of.x), ".");
  const int64_t parts = of.x.numel() / of.channels;
  of.check_like_input({"biased_var", biased_var});
  of.check_counts(count, parts);
  Tensor mean = of.per_channel(), variance = of.per_channel(), inv_std = of.per_channel();
  auto run = [&]<class T>(T) {
    merge(parts, data<T>(of.x, "mean"), data<T>(biased_var, "biased_var"),
          data<int64_t>(count, "count"),
          Stored<T>{data<T>(mean, "mean"), data<T>(variance, "variance"),
                    data<T>(inv_std, "inv_std"), eps});
  };
  is_double ? run(double()) : run(float());
  return {mean, variance, inv_std};
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
