// Sums over the columns of every matrix of a batch, then its rows, on the CPU.
#pragma once

#include "apex/engine/colwise_cpu.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Rows whose sums are added up alone, at least, so that threads may share a matrix without a say
// in the bits; and how many such parts a matrix has, at most.
inline constexpr int64_t kSampleRows = 512, kSampleParts = 64;

// A matrix's sums and the numbers of its columns.
template <class Program>
struct SampleSums {
  static constexpr int N = Program::kSums, kBefore = Program::kBefore;
  using T = typename Program::value_type;

  const double* totals;  // [N, stride]
  const T* vectors;      // [kVectors, stride]
  int64_t stride;

  Array<double, N> sums(int64_t column) const {
    return column_of<double, N>(totals, stride, column);
  }
  Array<T, kBefore> before(int64_t column) const {
    return column_of<T, kBefore>(vectors, stride, column);
  }
};

// The team of a group of columns: one thread.
struct LaneTeam {
  template <int N, class F>
  Array<double, N> sum(int64_t begin, int64_t end, const F& f) const {
    Array<double, N> total{};
    for (int64_t i = begin; i < end; ++i) {
      const Array<double, N> part = f(i);
      for (int n = 0; n < N; ++n) total[n] += part[n];
    }
    return total;
  }
  template <class F>
  void each(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin; i < end; ++i) f(i);
  }
  template <class F>
  void once(const F& f) const {
    f();
  }
};

template <class Program>
class SampleMatrices {
 public:
  using T = typename Program::value_type;
  static constexpr int N = Program::kSums;
  static constexpr int kVectors = Program::kVectors, kBefore = Program::kBefore;

  SampleMatrices(int64_t samples, int64_t rows, int64_t columns, const Program& program)
      : samples_(samples),
        rows_(rows),
        columns_(columns),
        stride_(sums_stride(columns)),
        parts_(std::clamp<int64_t>(rows / kSampleRows, 1, kSampleParts)),
        program_(program) {}

  // A matrix per thread, which finds it in its cache when it comes to the rows.
  template <class Context>
  void run_whole(const Context& context) const {
    context.parallel_for(0, samples_, grain(1), [&](int64_t begin, int64_t end) {
      auto block = zero_sums<T>(N * stride_);
      auto totals = zero_sums<double>(2 * N * stride_);
      double* part_totals = totals.get() + N * stride_;
      auto vectors = zero_sums<T>(kVectors * stride_);
      for (int64_t sample = begin; sample < end; ++sample) {
        const Program program = program_of(sample, vectors.get());
        make_before(program, vectors.get());
        std::fill_n(totals.get(), N * stride_, 0.0);
        for (int64_t part = 0; part < parts_; ++part) {
          std::fill_n(part_totals, N * stride_, 0.0);
          add_part(program, sample, part, block.get(), part_totals);
          merge_buffers(program_, totals.get(), part_totals, stride_, 0, columns_);
        }
        make_after(program, totals.get(), vectors.get());
        run_rows(program, sample * rows_, (sample + 1) * rows_);
      }
      finish_streams();
    });
  }

  // All threads on every matrix.
  template <class Context>
  void run_shared(const Context& context) const {
    auto totals = zero_sums<double>(samples_ * parts_ * N * stride_);
    auto totals_of = [&](int64_t part) { return totals.get() + part * N * stride_; };
    auto vectors = zero_sums<T>(samples_ * kVectors * stride_);
    auto vectors_of = [&](int64_t sample) { return vectors.get() + sample * kVectors * stride_; };
    each_sample(context, [&](int64_t sample) {
      make_before(program_.of_sample(sample), vectors_of(sample));
    });
    context.parallel_for(0, samples_ * parts_, grain(parts_), [&](int64_t begin, int64_t end) {
      auto block = zero_sums<T>(N * stride_);
      for (int64_t part = begin; part < end; ++part) {
        const int64_t sample = part / parts_;
        add_part(program_of(sample, vectors_of(sample)), sample, part % parts_, block.get(),
                 totals_of(part));
      }
    });
    each_sample(context, [&](int64_t sample) {
      double* first = totals_of(sample * parts_);
      for (int64_t part = 1; part < parts_; ++part) {
        merge_buffers(program_, first, first + part * N * stride_, stride_, 0, columns_);
      }
      make_after(program_.of_sample(sample), first, vectors_of(sample));
    });
    context.parallel_for(0, samples_ * rows_, grain(rows_), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t sample = begin / rows_, last = std::min(end, (sample + 1) * rows_);
        run_rows(program_of(sample, vectors_of(sample)), begin, last);
        begin = last;
      }
      finish_streams();
    });
  }

 private:
  // How many of `parts` equal parts of a matrix a thread takes at least.
  int64_t grain(int64_t parts) const {
    return std::max<int64_t>(1, kRowwiseGrain * parts / (rows_ * columns_));
  }

  template <class Context, class F>
  void each_sample(const Context& context, const F& f) const {
    constexpr int64_t kWork = 16;  // what a column costs here, in elements of a row
    const int64_t fewest = std::max<int64_t>(1, kRowwiseGrain / (kWork * columns_));
    context.parallel_for(0, samples_, fewest, [&](int64_t begin, int64_t end) {
      for (int64_t sample = begin; sample < end; ++sample) f(sample);
    });
  }

  Program program_of(int64_t sample, const T* vectors) const {
    Program own = program_.of_sample(sample);
    own.vectors = {vectors, stride_};
    return own;
  }

  void make_before(const Program& program, T* vectors) const {
    for (int64_t column = 0; column < columns_; ++column) {
      put(vectors + column, program.before(column));
    }
  }

  void make_after(const Program& program, const double* totals, T* vectors) const {
    const SampleSums<Program> matrix{totals, vectors, stride_};
    const LaneTeam team;
    const int64_t width = program.group_columns();
    for (int64_t begin = 0; begin < columns_; begin += width) {
      const Array<double, 2> of_group = program.statistics(team, begin / width, matrix);
      program.keep(team, begin / width, of_group, matrix);
      for (int64_t column = begin; column < begin + width; ++column) {
        put(vectors + kBefore * stride_ + column,
            program.after(column, matrix.before(column), of_group));
      }
    }
  }

  template <int K>
  void put(T* at, const Array<T, K>& numbers) const {
    for (int k = 0; k < K; ++k) at[k * stride_] = numbers[k];
  }

  void add_part(const Program& program, int64_t sample, int64_t part, T* block,
                double* totals) const {
    const int64_t first = sample * rows_;
    add_rows<false>(samples_ * rows_, columns_, first + rows_ * part / parts_,
                    first + rows_ * (part + 1) / parts_, program, block, totals);
  }

  void run_rows(const Program& program, int64_t begin, int64_t end) const {
    apex::run_rows(samples_ * rows_, columns_, begin, end, program);
  }

  int64_t samples_, rows_, columns_, stride_, parts_;
  const Program& program_;
};

template <class Context, SampleProgram Program>
void colwise_rowwise(const Context& context, int64_t samples, int64_t rows, int64_t columns,
                     const Program& program) {
  if (samples == 0 || rows == 0 || columns == 0) return;
  const SampleMatrices<Program> all(samples, rows, columns, program);
  const int64_t threads = context.threads();
  const bool is_small = samples * rows * columns <= kRowwiseGrain;
  if (is_small || samples % threads == 0 || samples >= 4 * threads) {
    all.run_whole(context);
  } else {
    all.run_shared(context);
  }
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
