// What kernels' headers use of C++'s standard library and of cuda_fp16.h, for NVRTC, which has
// neither: native/nvrtc.py gives this file for each of their names. Of what only the host's half
// uses, declarations suffice: it is read and not compiled.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using intptr_t = long;
using uintptr_t = unsigned long;

#if !defined(__HIPCC_RTC__)  // HIPRTC has these
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;

struct __half {
  unsigned short x;
};
__device__ __forceinline__ float __half2float(__half half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.x));
  return value;
}
__device__ __forceinline__ __half __float2half_rn(float value) {
  __half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.x) : "f"(value));
  return half;
}
#endif

namespace std {

using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));
using nullptr_t = decltype(nullptr);
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::uintptr_t;

using ::abs;
using ::copysign;
using ::cos;
using ::erf;
using ::exp;
using ::expm1;
using ::fabs;
using ::floor;
using ::fma;
using ::fmax;
using ::fmin;
using ::isfinite;
using ::isinf;
using ::isnan;
using ::log;
using ::log1p;
using ::memcpy;
using ::memset;
using ::nearbyint;
using ::pow;
using ::rint;
using ::sin;
using ::sqrt;
using ::tanh;

#if !defined(__HIPCC_RTC__)
template <class T, T number>
struct integral_constant {
  using type = integral_constant;
  using value_type = T;
  static constexpr T value = number;
  constexpr operator T() const { return number; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
#endif

template <bool, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool condition, class A, class B>
using conditional_t = typename conditional<condition, A, B>::type;

template <bool condition, class T = void>
using enable_if_t = typename enable_if<condition, T>::type;
template <class...>
using void_t = void;

template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
template <class A, class B>
concept same_as = is_same_v<A, B> && is_same_v<B, A>;

template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
struct remove_reference<T&&> {
  using type = T;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
using remove_cvref_t = remove_const_t<remove_reference_t<T>>;
template <class T>
using decay_t = remove_cvref_t<T>;

template <class T>
inline constexpr bool is_void_v = is_same_v<remove_const_t<T>, void>;
template <class T>
inline constexpr bool is_const_v = false;
template <class T>
inline constexpr bool is_const_v<const T> = true;
template <class T>
inline constexpr bool is_trivially_copyable_v = __is_trivially_copyable(T);
template <class T>
inline constexpr bool is_empty_v = __is_empty(T);
template <class T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, double>;

template <class T>
T&& declval() noexcept;
template <class T, T... numbers>
struct integer_sequence {
  static constexpr size_t size() { return sizeof...(numbers); }
};
template <size_t... numbers>
using index_sequence = integer_sequence<size_t, numbers...>;
template <size_t count, size_t... numbers>
struct counted_sequence : counted_sequence<count - 1, count - 1, numbers...> {};
template <size_t... numbers>
struct counted_sequence<0, numbers...> {
  using type = index_sequence<numbers...>;
};
template <size_t count>
using make_index_sequence = typename counted_sequence<count>::type;
template <class... T>
using index_sequence_for = make_index_sequence<sizeof...(T)>;

template <class T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <class T>
constexpr const T& clamp(const T& value, const T& low, const T& high) {
  return value < low ? low : high < value ? high : value;
}

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_bit_cast(float, 0x7f800000u); }
  static constexpr float quiet_NaN() { return __builtin_bit_cast(float, 0x7fc00000u); }
  static constexpr float min() { return 0x1p-126f; }
  static constexpr float max() { return 0x1.fffffep127f; }
  static constexpr float lowest() { return -max(); }
  static constexpr float epsilon() { return 0x1p-23f; }
};
template <>
struct numeric_limits<double> {
  static constexpr double infinity() { return __builtin_bit_cast(double, 0x7ff0000000000000ul); }
  static constexpr double quiet_NaN() { return __builtin_bit_cast(double, 0x7ff8000000000000ul); }
  static constexpr double min() { return 0x1p-1022; }
  static constexpr double max() { return 0x1.fffffffffffffp1023; }
  static constexpr double lowest() { return -max(); }
  static constexpr double epsilon() { return 0x1p-52; }
};
template <>
struct numeric_limits<int> {
  static constexpr int min() { return -max() - 1; }
  static constexpr int max() { return 0x7fffffff; }
};
template <>
struct numeric_limits<unsigned> {
  static constexpr unsigned max() { return ~0u; }
};
template <>
struct numeric_limits<int64_t> {
  static constexpr int64_t min() { return -max() - 1; }
  static constexpr int64_t max() { return 0x7fffffffffffffffl; }
};
template <>
struct numeric_limits<uint64_t> {
  static constexpr uint64_t max() { return ~0ul; }
};

template <class A, class B>
struct pair {
  A first;
  B second;
};
template <class T>
struct vector {
  size_t size() const;
  bool empty() const;
  T* data();
  const T* data() const;
  T& operator[](size_t);
  const T& operator[](size_t) const;
  const T* begin() const;
  const T* end() const;
};
template <class From, class Count, class To>
To copy_n(From from, Count count, To to);
template <class To, class Count, class T>
To fill_n(To to, Count count, const T& value);
template <class T>
void swap(T& a, T& b);

}  // namespace std
