// One tile of queries and one of keys: their tokens, and which of them hold values that are not finite.
//
// A weight of 0 does not silence a value that is not finite, since 0 * NaN is NaN. So a query or key with such a value
// enters all products as zeros, and the weights of all pairs with it that are seen become NaN afterwards.
#pragma once

#include "problem.h"
#include "scratch.h"
#include "sight.h"

namespace ringjax {

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// What is not finite becomes an infinity.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7fffu;
  const float size = rest < 0x400 ? rest * 5.9604644775390625e-8f : from_bits((rest << 13) + (112u << 23));  // 2^-24
  const float known = rest < 0x7c00 ? size : kInfinity;
  return sign ? -known : known;
}

// `count` numbers at `from` as float32, followed by zeros up to `width`.
inline void to_float(Type type, const char* from, long count, float* to, long width) {
  if (type == Type::kFloat32) {
    const float* x = reinterpret_cast<const float*>(from);
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(x + i));  // rows are too short for a call
    for (; i < count; i++) to[i] = x[i];
  } else {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
    if (type == Type::kBFloat16) {
      for (long i = 0; i < count; i++) to[i] = from_bits(uint32_t{x[i]} << 16);
    } else {
      for (long i = 0; i < count; i++) to[i] = half_to_float(x[i]);
    }
  }
  for (long i = count; i < width; i++) to[i] = 0;
}

// The largest size, as bits, among `count` numbers.
template <typename T>
inline T largest_bits(const char* numbers, long count) {
  typedef T V __attribute__((vector_size(kLanes * 4)));
  constexpr long kStep = sizeof(V) / sizeof(T);
  constexpr T kSize = static_cast<T>(~T{0}) >> 1;  // all bits but the sign's
  const T* x = reinterpret_cast<const T*>(numbers);
  V largest{};
  long i = 0;
  for (; i + kStep <= count; i += kStep) {
    const V size = load<V>(x + i) & kSize;
    largest = size > largest ? size : largest;
  }
  T found = 0;
  for (; i < count; i++) found = std::max<T>(found, x[i] & kSize);
  for (i = 0; i < kStep; i++) found = std::max<T>(found, largest[i]);
  return found;
}

// Whether all of `count` numbers are finite.
inline bool finite(Type type, const char* numbers, long count) {
  if (type == Type::kFloat32) return largest_bits<uint32_t>(numbers, count) < 0x7f800000u;
  return largest_bits<uint16_t>(numbers, count) < (type == Type::kBFloat16 ? 0x7f80 : 0x7c00);
}

inline bool finite(const float* x, long count) {
  return finite(Type::kFloat32, reinterpret_cast<const char*>(x), count);
}

// Of an array with rows of `count` numbers.
inline bool finite_row(Type type, const char* array, long count, long row) {
  return finite(type, array + row * count * item_size(type), count);
}

// Tokens of `count` slots from `first` on, written to `positions` where they follow from the slots.
inline TileTokens tile_tokens(const Problem& p, bool of_queries, long sequence, long first, long count,
                              int32_t* positions) {
  const Tokens &given = of_queries ? p.q_positions : p.k_positions, &segments = of_queries ? p.q_segments : p.k_segments;
  TileTokens tokens{};
  if (const int32_t* x = given.of(sequence)) tokens.scored = x + first;
  if (const int32_t* x = segments.of(sequence)) tokens.segments = x + first;
  if (p.mask.compares_positions()) {
    tokens.positions = tokens.scored;
    if (p.mask.order == Order::kSlots) {
      for (long i = 0; i < count; i++) positions[i] = p.mask.stride * (first + i) + (of_queries ? p.mask.by : 0);
      tokens.positions = positions;
    }
  }
  tokens.measure(count);
  return tokens;
}

struct QuerySide {
  long row;                // of the first query in arrays of [B, K, G, L]
  long query, step;        // likewise in arrays with a head dim, and from one query to the next
  long count, lanes;       // queries, and up to a whole number of vectors
  bool broken;             // whether there is any of the next
  int32_t bad[kQueries];   // -1 where something is not finite
  TileTokens tokens;       // of `lanes` queries
  float slope;             // of ALiBi
  uint32_t noise;
  int32_t positions[kQueries], segments[kQueries], scored[kQueries];

  void start(const Problem& p, long sequence, long head, long g, long first) {
    count = std::min(kQueries, p.q_slots.size - first);
    lanes = round_up(count, kLanes);
    row = p.row(sequence, head, g) + p.q_slots.start + first;
    query = p.query(sequence, p.q_slots.start + first, head, g);
    step = p.q_step();
    broken = false;
    std::memset(bad, 0, sizeof bad);
    const long own = (sequence * p.kv_heads + head) * p.group + g;
    slope = p.rule.alibi ? p.slopes[own] : 0;
    noise = p.rule.dropped ? p.noise[own] : 0;
    // Copies, since whole vectors of them are read.
    tokens = tile_tokens(p, true, sequence, first, count, positions);
    copy(tokens.positions, positions);
    copy(tokens.segments, segments);
    copy(tokens.scored, scored);
  }

  long at(long i) const { return query + i * step; }

  void mark(long i) {
    bad[i] = -1;
    broken = true;
  }

  // Finds what is not finite.
  void inspect(const Problem& p, const char* dout) {
    for (long i = 0; i < count; i++) {
      if (!finite_row(p.type, p.q, p.dim, at(i)) || (dout && !finite_row(p.type, dout, p.value_dim, at(i)))) mark(i);
    }
  }

 private:
  void copy(const int32_t*& from, int32_t* to) {
    if (!from) return;
    std::memmove(to, from, count * sizeof *to);
    for (long i = count; i < kQueries; i++) to[i] = 0;
    from = to;
  }
};

template <long kKeys>
struct KeySide {
  long row, step;  // of the first key among all of the problem, and from one to the next
  long count;
  bool loaded, broken;
  bool bad[kKeys];
  TileTokens tokens;
  int32_t positions[kKeys];

  void start(const Problem& p, long sequence, long head, long first) {
    count = std::min(kKeys, p.k_slots.size - first);
    row = p.key(sequence, p.k_slots.start + first, head);
    step = p.key_step();
    loaded = broken = false;
    std::memset(bad, 0, sizeof bad);
    tokens = tile_tokens(p, false, sequence, first, count, positions);
  }

  long at(long j) const { return row + j * step; }

  // Finds what is not finite.
  void inspect(const Problem& p) {
    broken = true;
    for (long j = 0; j < count; j++) bad[j] = !finite_row(p.type, p.kv, p.dim + p.value_dim, at(j));
  }
};

// Fetch a tile, and if anything in it is not finite find and mark what, and fetch it again without.
template <class Engine, typename Side>
void fetch_keys(const Engine& engine, const Problem& p, Side& side, typename Engine::Keys& keys, bool backward) {
  side.loaded = true;
  if (engine.load_keys(side, keys, backward)) return;
  side.inspect(p);
  engine.load_keys(side, keys, backward);
}

template <class Engine>
void fetch_queries(const Engine& engine, const Problem& p, QuerySide& side, const char* dout,
                   typename Engine::Queries& queries) {
  if (engine.load_queries(side, dout, queries)) return;
  side.inspect(p, dout);
  engine.load_queries(side, dout, queries);
}

// The keys of a tile that have to be looked at: [first, last).
struct Span {
  long first, last;
};

template <long kKeys>
inline Span span(const Mask& mask, const QuerySide& q, const KeySide<kKeys>& k, View view, long step) {
  Span keys{0, k.count};
  if (view == View::kSome) {
    while (keys.first < keys.last && !meets(mask, q.tokens, k.tokens, keys.first)) keys.first++;
    while (keys.last > keys.first && !meets(mask, q.tokens, k.tokens, keys.last - 1)) keys.last--;
    keys.first = keys.first / step * step;
  }
  return keys;
}

}  // namespace ringjax
