// Mean and variance of a stream of numbers, one number or one part at a time.
//
// Welford 1962 (https://doi.org/10.1080/00401706.1962.10490022) for single numbers; Chan, Golub &
// LeVeque 1983 (https://doi.org/10.1080/00031305.1983.10483115), equation 2.1, for parts. Neither
// subtracts large numbers of similar size, as E[x^2] - E[x]^2 does.
#pragma once

#include "apex/core/types.h"
#include "apex/math/quotient.h"

namespace apex {
inline namespace APEX_BACKEND_NS {

// {count, mean, m2}: m2 is the sum of squared deviations from the mean. All zero: no numbers yet.
template <class T>
using Moments = Array<T, 3>;

// The rounding errors of the mean grow with the root of the count: keep streams short, merge parts.
template <class T>
APEX_HD void add_number(Moments<T>& moments, T x) {
  moments[0] += T(1);
  T delta = x - moments[1];
  moments[1] += quotient(delta, moments[0]);
  moments[2] += delta * (x - moments[1]);
}

// total := the moments of both parts; either may be empty.
template <class T>
APEX_HD void merge_moments(Moments<T>& total, const Moments<T>& part) {
  T count = total[0] + part[0];
  T share = count > T(0) ? quotient_of_counts(part[0], count) : T(0);
  T delta = part[1] - total[1];
  total[1] += delta * share;
  total[2] += part[2] + delta * delta * total[0] * share;
  total[0] = count;
}

// Biased variance; 0 of no numbers.
template <class T>
APEX_HD T variance_of(const Moments<T>& moments) {
  return moments[0] > T(0) ? moments[2] / moments[0] : T(0);
}

}  // namespace APEX_BACKEND_NS
}  // namespace apex
