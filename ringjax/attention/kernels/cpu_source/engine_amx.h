// The products of attention in the matrix unit of Intel CPUs (AMX): bfloat16 operands, float32 sums.
//
// The unit multiplies a tile of A, 16 rows of 32 numbers, by a tile of B whose rows hold pairs: numbers 2t and 2t + 1 of
// a column beside each other. Scores lie as [keys][queries] here too, and sums of queries as [dim][queries]: then the
// weights of two keys are paired lane by lane, and only operands that many products share are ever transposed.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

namespace ringjax {

// Whether Linux lets this process use the unit. Asking once is enough for all of its threads.
inline bool amx_permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return permitted;
}

class AmxEngine {
 public:
  static constexpr long kForwardKeys = 128, kBackwardKeys = 64;
  static constexpr long kKeyStep = 32;  // what the unit sums over at a time

  struct Keys {
    uint16_t *k, *v;      // [keys][width]; v in the backward pass only
    uint16_t *k_t, *v_t;  // [width][keys]; k_t in the backward pass only, v_t in the forward pass
    uint32_t* weights;    // of pairs of keys, [keys / 2][kQueries], forward weights or backward ds
    uint16_t *of_dv, *of_dk;  // weights and ds, [keys][kQueries]
    long count;
  };
  struct Queries {
    uint32_t *q_t, *dout_t;  // pairs along the head dim, [width / 2][kQueries]
    uint32_t *q, *dout;      // pairs of queries, [kQueries / 2][width]
    float* sum;              // [width][kQueries]
  };
  struct Gradients {
    float *dk, *dv;
  };

  AmxEngine(const Problem& p, Scratch& scratch)
      : p_(p), width_(round_up(p.dim, 32)), value_width_(round_up(p.value_dim, 32)) {
    rows_ = scratch.take<uint16_t>(kQueries * std::max(width_, value_width_));
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" ::"r"(&config) : "memory");  // the compiler does not know that all of it is read
    _tile_loadconfig(&config);
  }
  ~AmxEngine() { _tile_release(); }
  AmxEngine(const AmxEngine&) = delete;

  Keys keys(Scratch& scratch, long tile, bool backward) const {
    Keys keys{};
    keys.count = tile;
    keys.k = scratch.take<uint16_t>(tile * width_);
    keys.v = scratch.take<uint16_t>(tile * value_width_);
    keys.weights = scratch.take<uint32_t>(tile / 2 * kQueries);
    if (backward) {
      keys.k_t = scratch.take<uint16_t>(tile * width_);
      keys.of_dv = scratch.take<uint16_t>(tile * kQueries);
      keys.of_dk = scratch.take<uint16_t>(tile * kQueries);
    } else {
      keys.v_t = scratch.take<uint16_t>(tile * value_width_);
    }
    return keys;
  }

  template <typename Side>
  bool load_keys(const Side& side, Keys& keys, bool backward) const {
    const long row = p_.dim + p_.value_dim;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(p_.kv) + side.row * row;
    for (long j = 0; j < keys.count; j++, from += side.step * row) {
      const bool absent = j >= side.count || side.bad[j];
      copy(from, absent ? 0 : p_.dim, keys.k + j * width_, width_);
      copy(from + p_.dim, absent ? 0 : p_.value_dim, keys.v + j * value_width_, value_width_);
    }
    if (backward) {
      transpose(keys.k, keys.count, width_, keys.k_t);
    } else {
      transpose(keys.v, keys.count, value_width_, keys.v_t);
    }
    return all_finite(keys.k, keys.count * width_) && all_finite(keys.v, keys.count * value_width_);
  }

  Queries queries(Scratch& scratch, bool backward) const {
    Queries q{};
    q.q_t = scratch.take<uint32_t>(width_ / 2 * kQueries);
    q.sum = scratch.zeros<float>((backward ? width_ : value_width_) * kQueries);
    if (backward) {
      q.q = scratch.take<uint32_t>(kQueries / 2 * width_);
      q.dout_t = scratch.take<uint32_t>(value_width_ / 2 * kQueries);
      q.dout = scratch.take<uint32_t>(kQueries / 2 * value_width_);
    }
    return q;
  }

  bool load_queries(const QuerySide& side, const char* dout, Queries& q) const {
    bool whole = load_rows(side, p_.q, p_.dim, width_, q.q_t, q.q);
    if (dout) whole &= load_rows(side, dout, p_.value_dim, value_width_, q.dout_t, q.dout);
    return whole;
  }

  void score(const QuerySide& side, const Keys& keys, const Queries& q, Span span, float* scores) const {
    multiply(keys.k + span.first * width_, width_, q.q_t, kQueries, scores, kQueries, whole(span), lanes(side), width_,
             false);
  }

  void score_values(const QuerySide& side, const Keys& keys, const Queries& q, Span span, float* products) const {
    multiply(keys.v + span.first * value_width_, value_width_, q.dout_t, kQueries, products, kQueries, whole(span),
             lanes(side), value_width_, false);
  }

  void add_values(const QuerySide& side, const Keys& keys, Queries& q, Span span, const float* weights,
                  const float* factors) const {
    pair(weights, span.last - span.first, keys.weights);
    bool change = false;
    for (long x = 0; x < side.lanes; x++) change |= factors[x] != 1.0f;
    if (change) {
      for (long d = 0; d < value_width_; d++) {
        for (long x = 0; x < kQueries; x += kLanes) {
          float* sum = q.sum + d * kQueries + x;
          store(sum, load(sum) * load(factors + x));
        }
      }
    }
    multiply(keys.v_t + span.first, keys.count, keys.weights, kQueries, q.sum, kQueries, value_width_, lanes(side),
             whole(span), true);
  }

  Gradients gradients(Scratch& scratch, long tile) const {
    return {scratch.take<float>(tile * width_), scratch.take<float>(tile * value_width_)};
  }

  void clear(Gradients& of, long tile) const {
    std::memset(of.dk, 0, tile * width_ * sizeof(float));
    std::memset(of.dv, 0, tile * value_width_ * sizeof(float));
  }

  void add_gradients(const QuerySide& side, const Keys& keys, Queries& q, Span span, const float* weights,
                     const float* ds, Gradients& of) const {
    const long count = span.last - span.first;
    round(weights, count, keys.of_dv);
    round(ds, count, keys.of_dk);
    pair(ds, count, keys.weights);
    multiply(keys.of_dv, kQueries, q.dout, value_width_, of.dv + span.first * value_width_, value_width_, whole(span),
             value_width_, lanes(side), true);
    multiply(keys.of_dk, kQueries, q.q, width_, of.dk + span.first * width_, width_, whole(span), width_, lanes(side),
             true);
    multiply(keys.k_t + span.first, keys.count, keys.weights, kQueries, q.sum, kQueries, width_, lanes(side),
             whole(span), true);
  }

  const float* sum_row(const Queries& q, long i, bool backward, float* row) const {
    const long width = backward ? width_ : value_width_;
    for (long d = 0; d < width; d++) row[d] = q.sum[d * kQueries + i];
    return row;
  }

  long width() const { return width_; }
  long value_width() const { return value_width_; }

 private:
  static long whole(Span span) { return round_up(span.last - span.first, kKeyStep); }
  static long lanes(const QuerySide& side) { return round_up(side.lanes, 32); }

  // C (+)= A B, all sizes multiples of 32: four tiles of C at a time. Rows of B hold pairs.
  static __attribute__((noinline)) void multiply(const uint16_t* a, long a_row, const uint32_t* b, long b_row, float* c,
                                                 long c_row, long rows, long cols, long depth, bool adds) {
    asm volatile("" ::: "memory");
    for (long i = 0; i < rows; i += 32) {
      for (long j = 0; j < cols; j += 32) {
        float *c0 = c + i * c_row + j, *c1 = c0 + 16 * c_row;
        if (adds) {
          _tile_loadd(0, c0, c_row * 4);
          _tile_loadd(1, c0 + 16, c_row * 4);
          _tile_loadd(2, c1, c_row * 4);
          _tile_loadd(3, c1 + 16, c_row * 4);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        for (long t = 0; t < depth; t += 32) {
          const uint16_t* of_a = a + i * a_row + t;
          const uint32_t* of_b = b + t / 2 * b_row + j;
          _tile_loadd(4, of_a, a_row * 2);
          _tile_loadd(6, of_b, b_row * 4);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, of_b + 16, b_row * 4);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, of_a + 16 * a_row, a_row * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c0, c_row * 4);
        _tile_stored(1, c0 + 16, c_row * 4);
        _tile_stored(2, c1, c_row * 4);
        _tile_stored(3, c1 + 16, c_row * 4);
      }
    }
    asm volatile("" ::: "memory");
  }

  static bool all_finite(const uint16_t* x, long count) {
    return finite(Type::kBFloat16, reinterpret_cast<const char*>(x), count);
  }

  static void copy(const uint16_t* from, long count, uint16_t* to, long width) {
    std::memcpy(to, from, count * sizeof *to);
    std::memset(to + count, 0, (width - count) * sizeof *to);
  }

  // Rows of 16 numbers, and the same of another row, as pairs.
  static __m512i paired(Vec first, Vec second) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    return _mm512_permutexvar_epi16(alternating(), both);
  }

  // 0, 16, 1, 17, ...
  static __m512i alternating() {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
  }

  // [count][kQueries] as pairs of rows, with zeros after the last row up to a whole step.
  static void pair(const float* rows, long count, uint32_t* pairs) {
    for (long j = 0; j < round_up(count, kKeyStep); j += 2, pairs += kQueries, rows += 2 * kQueries) {
      for (long x = 0; x < kQueries; x += 16) {
        const Vec first = j < count ? load(rows + x) : Vec{};
        const Vec second = j + 1 < count ? load(rows + kQueries + x) : Vec{};
        _mm512_storeu_si512(pairs + x, paired(first, second));
      }
    }
  }

  // [count][kQueries] rounded, likewise.
  static void round(const float* rows, long count, uint16_t* rounded) {
    const long size = count * kQueries;
    for (long i = 0; i < size; i += 32) {
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(rows + i + 16), load(rows + i)));
      _mm512_storeu_si512(rounded + i, both);
    }
    std::memset(rounded + size, 0, (round_up(count, kKeyStep) * kQueries - size) * sizeof *rounded);
  }

  static __m512i steps(long stride) {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mullo_epi32(low, _mm512_set1_epi32(static_cast<int>(stride)));
  }

  // [rows][width] -> [width][rows]
  static void transpose(const uint16_t* from, long rows, long width, uint16_t* to) {
    const __m512i place = steps(width * 2);
    // Of two vectors of pairs the first numbers, and the second ones.
    const __m512i even = _mm512_set_epi32(62 << 16 | 60, 58 << 16 | 56, 54 << 16 | 52, 50 << 16 | 48, 46 << 16 | 44,
                                          42 << 16 | 40, 38 << 16 | 36, 34 << 16 | 32, 30 << 16 | 28, 26 << 16 | 24,
                                          22 << 16 | 20, 18 << 16 | 16, 14 << 16 | 12, 10 << 16 | 8, 6 << 16 | 4,
                                          2 << 16 | 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    for (long i = 0; i < rows; i += 32) {
      for (long d = 0; d < width; d += 2) {
        const uint16_t* at = from + i * width + d;
        const __m512i first = _mm512_i32gather_epi32(place, at, 1);
        const __m512i second = _mm512_i32gather_epi32(place, at + 16 * width, 1);
        _mm512_storeu_si512(to + d * rows + i, _mm512_permutex2var_epi16(first, even, second));
        _mm512_storeu_si512(to + (d + 1) * rows + i, _mm512_permutex2var_epi16(first, odd, second));
      }
    }
  }

  // Queries as pairs along the head dim, and, if asked for, as pairs of queries.
  bool load_rows(const QuerySide& side, const char* array, long dim, long width, uint32_t* along_dim,
                 uint32_t* of_queries) const {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(array) + side.query * dim;
    for (long i = 0; i < kQueries; i++) {
      const bool absent = i >= side.count || side.bad[i];
      copy(from + i * side.step * dim, absent ? 0 : dim, rows_ + i * width, width);
    }
    const __m512i place = steps(width * 2);
    for (long d = 0; d < width / 2; d++) {
      for (long x = 0; x < kQueries; x += 16) {
        const __m512i pairs = _mm512_i32gather_epi32(place, rows_ + x * width + 2 * d, 1);
        _mm512_storeu_si512(along_dim + d * kQueries + x, pairs);
      }
    }
    if (of_queries) {
      for (long x = 0; x < kQueries; x += 2) {
        for (long d = 0; d < width; d++) {
          const uint32_t first = rows_[x * width + d], second = rows_[(x + 1) * width + d];
          of_queries[x / 2 * width + d] = first | second << 16;
        }
      }
    }
    return all_finite(rows_, kQueries * width);
  }

  const Problem& p_;
  const long width_, value_width_;
  uint16_t* rows_;  // queries of a tile, [kQueries][width]
};

}  // namespace ringjax
