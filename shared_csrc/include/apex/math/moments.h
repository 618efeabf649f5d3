// Mean and variance of a stream of numbers, one number or one part at a time.
//
// Single numbers are summed relative to the first one, parts are merged by Chan, Golub & LeVeque 1983
// (https://doi.org/10.1080/00031305.1983.10483115), equation 2.1. Neither subtracts large numbers of
// similar size, as E[x^2] - E[x]^2 does; unlike Welford's update, adding a number divides nothing.
#pragma once

#include "apex/core/types.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// {count, mean, m2}: m2 is the sum of squared deviations from the mean. All zero: no numbers yet.
template <class T>
using Moments = Array<T, 3>;

// {count, shift, sum of x - shift, sum of (x - shift)^2}. All zero: no numbers yet.
template <class T>
using ShiftedSums = Array<T, 4>;

// total := the moments of both parts; either may be empty.
template <class T>
APEX_HD void merge_moments(Moments<T>& total, const Moments<T>& part) {
  T count = total[0] + part[0];
  T share = count > T(0) ? part[0] / count : T(0);
  T delta = part[1] - total[1];
  total[1] += delta * share;
  total[2] += part[2] + delta * delta * total[0] * share;
  total[0] = count;
}

template <class T>
APEX_HD void add_number(ShiftedSums<T>& sums, T x) {
  sums[1] = sums[0] == T(0) ? x : sums[1];
  T delta = x - sums[1];
  sums[0] += T(1);
  sums[2] += delta;
  sums[3] += delta * delta;
}

template <class T>
APEX_HD Moments<T> moments_of(const ShiftedSums<T>& sums) {
  T offset = sums[0] > T(0) ? sums[2] / sums[0] : T(0);
  T m2 = sums[3] - sums[2] * offset;
  return {{sums[0], sums[1] + offset, m2 < T(0) ? T(0) : m2}};
}

template <class T>
APEX_HD void merge_sums_of(ShiftedSums<T>& total, const ShiftedSums<T>& part) {
  Moments<T> merged = moments_of(total);
  merge_moments(merged, moments_of(part));
  total = {{merged[0], merged[1], T(0), merged[2]}};
}

// Biased variance; 0 of no numbers.
template <class T>
APEX_HD T variance_of(const Moments<T>& moments) {
  return moments[0] > T(0) ? moments[2] / moments[0] : T(0);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
