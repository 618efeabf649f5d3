// Cells (t, u) of samples of different lengths, among the rows of a matrix.
#pragma once

#include "apex/core/divide.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// Rows are [batch, frames, width], or packed: one sample behind the other, each with its own
// numbers of frames and columns.
struct Cells {
  const int64_t* f_len;  // [batch], frames of each sample
  const int64_t* u_len;  // [batch], columns of each sample, less `more`
  int64_t more;
  const int64_t* ends;  // [batch] of packed rows: where a sample's end; null without samples
  int64_t batch, rows, frames, width;
  bool is_packed;

  struct Sample {
    int64_t start, stride, frames, width;  // the row of cell (t, u) is start + t * stride + u
    bool is_valid;                         // whether all of that is inside the rows
  };

  struct Cell {
    int64_t batch, t, u;
    Sample sample;
    bool is_inside;
    int64_t alike = 1;  // how many rows from this one on are of its frame, and inside or not as it
  };

  APEX_HD Sample sample(int64_t b) const {
    // Any numbers may stand there: each is compared before it is part of a sum or a product.
    const int64_t f = f_len[b], u = u_len[b];
    const bool fits = f >= 0 && f <= frames && u >= 0 && u <= width - more;
    if (!fits) return {0, 0, 0, 0, false};
    const int64_t columns = u + more;
    if (!is_packed) return {b * frames * width, width, f, columns, true};
    const int64_t end = ends[b];
    if (end < 0 || end > rows || (columns > 0 && f > rows)) return {0, 0, 0, 0, false};
    const int64_t start = end - f * columns;
    return {start, columns, f, columns, start >= 0};
  }

  APEX_HD Cell cell(int64_t row) const {
    int64_t b = 0, t = 0, u = 0;
    if (!is_packed) {
      b = divide(divide(row, width, u), frames, t);
    } else {
      for (int64_t end = batch; b < end;) {  // the first sample that ends behind the row
        const int64_t middle = (b + end) / 2;
        if (ends[middle] <= row) {
          b = middle + 1;
        } else {
          end = middle;
        }
      }
      if (b == batch) return {};
    }
    const Sample s = sample(b);
    if (!s.is_valid || row < s.start) return {};
    if (is_packed) t = divide(row - s.start, s.stride, u);
    const bool is_inside = t < s.frames && u < s.width;
    const int64_t alike = is_inside ? s.width - u : !is_packed ? width - u : 1;
    return {b, t, u, s, is_inside, alike};
  }
};

}  // namespace APEX_BACKEND_NS
}  // namespace apex
