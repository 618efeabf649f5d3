// The little of Thrust's complex type that torch's header-only complex number names.
//
// Found only by the HIP compile check on machines whose hipcc comes without Thrust; on a ROCm
// installation the real header is used.
#pragma once

#include <cmath>

namespace thrust {

template <class T>
class complex {
 public:
  __host__ __device__ complex(T real = T(), T imag = T()) : real_(real), imag_(imag) {}
  __host__ __device__ T real() const { return real_; }
  __host__ __device__ T imag() const { return imag_; }

 private:
  T real_, imag_;
};

template <class T>
__host__ __device__ complex<T> polar(const T& magnitude, const T& angle) {
  return {magnitude * std::cos(angle), magnitude * std::sin(angle)};
}

}  // namespace thrust
