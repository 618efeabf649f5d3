// What a wheel's library would take of a C or C++ library newer than torch's own wheels need
// (glibc 2.28, libstdc++ of g++ 8), defined here once more: the wheel then loads wherever torch
// does, whichever compiler built it. A version script keeps these definitions inside the library;
// ci/check_wheel.py names what a newer compiler adds.
#include <cmath>
#include <new>
#include <sstream>

// glibc 2.29 gave these functions, unchanged in value, a version that does not set errno.
#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#if defined(__x86_64__)
#define APEX_OLDEST_GLIBC "GLIBC_2.2.5"
#else
#define APEX_OLDEST_GLIBC "GLIBC_2.17"
#endif
#define APEX_OLD_FUNCTION(name, parameters, arguments)                \
  __asm__(".symver apex_old_" #name "," #name "@" APEX_OLDEST_GLIBC); \
  double apex_old_##name parameters;                                  \
  double name parameters noexcept { return apex_old_##name arguments; }

extern "C" {
APEX_OLD_FUNCTION(exp, (double x), (x))
APEX_OLD_FUNCTION(exp2, (double x), (x))
APEX_OLD_FUNCTION(log, (double x), (x))
APEX_OLD_FUNCTION(log2, (double x), (x))
APEX_OLD_FUNCTION(pow, (double x, double y), (x, y))

// glibc 2.32: false is always right, and lets shared pointers count by atomic operations.
char __libc_single_threaded = 0;
}
#endif

#if defined(__GLIBCXX__)
// libstdc++ of g++ 11
[[noreturn]] void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// libstdc++ of g++ 9 and 11: members of a stream that its shared library instantiates.
template std::stringstream::basic_stringstream();
template std::ostringstream::basic_ostringstream();
template std::istringstream::basic_istringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;
#endif
