// Vectors as wide as the CPU's registers, in the extension that GCC and Clang share, and the two functions that
// attention takes of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

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

// 2^x to 1.3 units in the last place. 0 where x is -inf or below -126, NaN where x is NaN. x is no more than 127.
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
  Vec p = r * 0.001326472731307149f + 0.009671512991189957f;
  p = p * r + 0.05550733581185341f;
  p = p * r + 0.24022242426872253f;
  p = p * r + 0.6931470036506653f;
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

// log(x) to 1e-7, or a unit in the last place if that is more, of a normal number; NaN if x is NaN.
inline Vec log(Vec x) {
  // x = 2^n m with m between the roots of 1/2 and 2; log(m) by the polynomial of least error.
  UVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  const IVec n = (IVec)(bits - 0x3f3504f3u) >> 23;
  bits -= (UVec)n << 23;
  Vec m;
  std::memcpy(&m, &bits, sizeof m);
  const Vec f = m - 1.0f;
  Vec p = f * 0.08672191947698593f - 0.14379015564918518f;
  p = p * f + 0.14977993071079254f;
  p = p * f - 0.16564424335956573f;
  p = p * f + 0.19954875111579895f;
  p = p * f - 0.250016987323761f;
  p = p * f + 0.33334165811538696f;
  p = p * f - 0.5f;
  const Vec result = __builtin_convertvector(n, Vec) * static_cast<float>(kLn2) + (p * (f * f) + f);
  return x == x ? result : x;
}

// Every second lane from a, the others from b, of both lower (kFirst = 0) or upper (kFirst = kLanes / 2) halves.
template <int kFirst, int... kLane>
inline Vec interleave(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, IVec{(kFirst + kLane / 2 + kLane % 2 * kLanes)...});
#endif
}

// The transpose of kLanes rows of as many numbers: each step doubles the number of rows whose numbers lie together.
inline void transpose(Vec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 8
  for (int step = 1; step < kLanes; step *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kLanes / 2], lanes);
      next[2 * i + 1] = interleave<kLanes / 2>(rows[i], rows[i + kLanes / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) rows[i] = next[i];
  }
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
