// Vectors as wide as the CPU's registers, in the extension that GCC and Clang share, and the two functions that
// attention takes of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ringjax {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

template <typename V = Vec, typename T>
inline V load(const T* at) {
  V x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

template <typename V, typename T>
inline void store(T* at, V x) {
  std::memcpy(at, &x, sizeof x);
}

inline Vec all(float x) { return x - Vec{}; }
inline UVec all(uint32_t x) { return x - UVec{}; }
inline IVec all(int32_t x) { return x - IVec{}; }

// Of two numbers the larger; b if one is NaN.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// 2^x to a unit in the last place. 0 where x is -inf or below -126, NaN where x is NaN. x is no more than 127.
inline Vec exp2(Vec x) {
  // x = n + r with n whole and |r| <= 1/2; 2^r by the polynomial of least relative error.
#if defined(__AVX512DQ__)
  const Vec r = _mm512_reduce_ps(x, 0);
  const Vec n = x - r;
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: after adding it the low bits of a float are its whole part
  const Vec shifted = x + magic;
  const Vec n = shifted - magic;
  const Vec r = x - n;
#endif
  Vec p = r * 0.0001534581242594868f + 0.0013399930903688073f;
  p = p * r + 0.009618489071726799f;
  p = p * r + 0.05550328642129898f;
  p = p * r + 0.24022646248340607f;
  p = p * r + 0.6931471824645996f;
  p = p * r + 1.0f;
#if defined(__AVX512DQ__)
  return _mm512_scalef_ps(p, n);
#else
  IVec bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  IVec power;
  std::memcpy(&power, &p, sizeof power);
  power += bits << 23;
  Vec result;
  std::memcpy(&result, &power, sizeof result);
  return x < -126.0f ? Vec{} : result;
#endif
}

// A factor that turns scores into powers of two. Rounded to one float it would be off by the same share for all scores,
// as a wrong scale is, and gradients that nearly cancel show it.
struct Factor {
  float high, low;  // low is never 0, and never negative: -inf times it stays -inf

  explicit Factor(double x) {
    high = std::nextafter(static_cast<float>(x), 0.0f);
    low = static_cast<float>(x - high);
  }

  // factor * x - shift
  Vec power(Vec x, Vec shift) const { return x * high + (x * low - shift); }
};

// tanh(x) to a few units in the last place, from e = exp(2 |x|) - 1 as e / (e + 2).
inline Vec tanh(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec twice = size > 20.0f ? all(40.0f) : 2.0f * size;
  const float magic = 12582912.0f;
  const Vec n = (twice * static_cast<float>(kLog2e) + magic) - magic;
  const Vec r = (twice - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in n times it
  Vec p = r * 0.0013888872927054763f + 0.00836906861513853f;
  p = p * r + 0.041667137295007706f;
  p = p * r + 0.16666506230831146f;
  p = p * r + 0.4999999701976777f;
  p = p * r + 1.0f;
  const Vec power = exp2(n);
  const Vec e = power * (p * r) + (power - 1.0f);
  const Vec positive = e / (e + 2.0f);
  return x < 0.0f ? -positive : positive;
}

}  // namespace ringjax
