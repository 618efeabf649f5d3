// The product of small float16 matrices on the CPU: sums in float32, rounded once at the end.
#pragma once

#include <algorithm>
#include <vector>

#include "apex/core/pack_cpu.h"

namespace apex::amp {
inline namespace APEX_BACKEND_NS {

// A matrix of any layout; strides in elements.
struct Matrix {
  const Half* data;
  int64_t rows, columns, row_stride, column_stride;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }

  // `count` elements of a row, kGroup at most.
  void load(int64_t row, int64_t column, int count, float* values) const {
    const Half* first = data + row * row_stride + column * column_stride;
    if (column_stride == 1) return load_group(first, values, count);
    for (int i = 0; i < count; ++i) values[i] = to_float(first[i * column_stride]);
  }
};

// alpha * sum + beta * added
struct Scaled {
  float alpha, beta;
  Matrix added;  // not read if beta is 0

  void store(int64_t row, int64_t column, int count, float* sums, Half* to, int64_t stride) const {
    if (alpha != 1) {
      for (int j = 0; j < kGroup; ++j) sums[j] *= alpha;
    }
    if (beta != 0) {
      alignas(64) float addends[kGroup] = {};
      added.load(row, column, count, addends);
      for (int j = 0; j < kGroup; ++j) sums[j] += beta * addends[j];
    }
    if (stride == 1) return store_group(to, sums, count);
    for (int j = 0; j < count; ++j) to[j * stride] = to_half(sums[j]);
  }
};

inline int groups_end(int64_t begin, int64_t end) {
  return static_cast<int>(std::min<int64_t>(kGroup, end - begin));
}

class SmallProduct {
 public:
  // target[i, j] = scaled(sum over k of a[i, k] * b[k, j])
  void run(const Matrix& a, const Matrix& b, const Scaled& scaled, Half* target, int64_t row_stride,
           int64_t column_stride) {
    if (b.columns < kGroup && b.columns < a.rows) {  // the longer side of the result fills vectors
      Scaled turned = {scaled.alpha, scaled.beta, scaled.added.transposed()};
      return run(b.transposed(), a.transposed(), turned, target, column_stride, row_stride);
    }
    widen(a);
    // Rows of a vector's width are made of b's columns. For few rows of `a` that takes longer than
    // to add up vectors along k, of which each sum then needs one more addition per lane.
    bool along_k = b.row_stride == 1 && 8 * a.rows <= a.columns;
    panel_.resize(along_k ? 0 : b.rows * kGroup);
    for (int64_t column = 0; column < b.columns; column += kGroup) {
      int count = groups_end(column, b.columns);
      if (!along_k) fill_panel(b, column, count);
      for (int64_t row = 0; row < a.rows; row += kRows) {
        int rows = static_cast<int>(std::min<int64_t>(kRows, a.rows - row));
        alignas(64) float sums[kRows][kGroup] = {};
        if (along_k) {
          for (int j = 0; j < count; ++j)
            add_along_k(row, rows, b.transposed(), column + j, j, sums);
        } else {
          add_panel(row, b.rows, sums);
        }
        for (int i = 0; i < rows; ++i) {
          Half* to = target + (row + i) * row_stride + column * column_stride;
          scaled.store(row + i, column, count, sums[i], to, column_stride);
        }
      }
    }
  }

 private:
  static constexpr int kRows = 4;  // sums of as many rows by kGroup columns stay in registers

  // All of `a` in float32, filled up with zeros to whole groups and kRows.
  void widen(const Matrix& a) {
    depth_ = (a.columns + kGroup - 1) / kGroup * kGroup;
    wide_.assign((a.rows + kRows - 1) / kRows * kRows * depth_, 0.0f);
    if (a.column_stride == 1) {
      for (int64_t row = 0; row < a.rows; ++row) {
        for (int64_t k = 0; k < a.columns; k += kGroup) {
          a.load(row, k, groups_end(k, a.columns), wide_.data() + row * depth_ + k);
        }
      }
    } else {
      turn(a.transposed(), 0, a.columns, 0, a.rows, wide_.data(), depth_);
    }
  }

  // kGroup columns of `b`, side by side; those beyond `count` are not used.
  void fill_panel(const Matrix& b, int64_t column, int count) {
    if (b.column_stride == 1) {
      for (int64_t k = 0; k < b.rows; ++k) b.load(k, column, count, panel_.data() + k * kGroup);
    } else {
      turn(b.transposed(), column, column + count, 0, b.rows, panel_.data(), kGroup);
    }
  }

  // Rows `begin` to `end` of a matrix become columns.
  static void turn(const Matrix& from, int64_t begin, int64_t end, int64_t first, int64_t last,
                   float* to, int64_t stride) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = first; column < last; column += kGroup) {
        int count = groups_end(column, last);
        alignas(64) float values[kGroup];
        from.load(row, column, count, values);
        for (int i = 0; i < count; ++i) to[(column + i) * stride + row - begin] = values[i];
      }
    }
  }

  void add_panel(int64_t row, int64_t depth, float (&sums)[kRows][kGroup]) const {
    const float *a = wide_.data() + row * depth_, *panel = panel_.data();
    for (int64_t k = 0; k < depth; ++k) {
      APEX_VECTORIZE_FEW
      for (int j = 0; j < kGroup; ++j) {
        float value = panel[k * kGroup + j];
        for (int i = 0; i < kRows; ++i) sums[i][j] += a[i * depth_ + k] * value;
      }
    }
  }

  // The sums of one column of the result; `b` is transposed.
  void add_along_k(int64_t row, int rows, const Matrix& b, int64_t column, int j,
                   float (&sums)[kRows][kGroup]) const {
    const float* a = wide_.data() + row * depth_;
    alignas(64) float lanes[kRows][kGroup] = {};
    for (int64_t k = 0; k < b.columns; k += kGroup) {
      alignas(64) float values[kGroup] = {};
      b.load(column, k, groups_end(k, b.columns), values);
      for (int i = 0; i < rows; ++i) {
        APEX_VECTORIZE_FEW
        for (int lane = 0; lane < kGroup; ++lane) {
          lanes[i][lane] += a[i * depth_ + k + lane] * values[lane];
        }
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int width = kGroup / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[i][lane] += lanes[i][lane + width];
      }
      sums[i][j] = lanes[i][0];
    }
  }

  int64_t depth_ = 0;
  std::vector<float> wide_, panel_;
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex::amp
