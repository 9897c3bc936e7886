// What the tokens of a tile see, judged by ranges of positions and segments for whole tiles and one by one inside.
#pragma once

#include "problem.h"

namespace ringjax {

struct Range {
  int64_t low, high;
};

inline Range range(const int32_t* x, long count) {
  int32_t low = x[0], high = x[0];
  for (long i = 1; i < count; i++) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  return {low, high};
}

// Tokens of one tile. Their positions are those of the mask; the ones that scores depend on may differ.
struct TileTokens {
  const int32_t* positions;  // null if the mask compares none
  const int32_t* segments;   // null = one document
  const int32_t* scored;     // positions that scores depend on
  Range position, segment;

  void measure(long count) {
    if (positions) position = range(positions, count);
    if (segments) segment = range(segments, count);
  }
};

enum class View { kNothing, kSome, kAll };

// What all queries of these ranges see of all keys of these ranges: exact for single tokens.
inline View view(const Mask& mask, const TileTokens& q, Range k_position, Range k_segment) {
  bool some = true, every = true;
  if (q.positions) {
    const int64_t least = q.position.low - k_position.high, most = q.position.high - k_position.low;
    const int64_t low = mask.causal ? 0 : 1 - mask.window, high = mask.window - 1;
    some = most >= low && least <= high;
    every = least >= low && most <= high;
    some |= k_position.low < mask.prefix;
    every |= k_position.high < mask.prefix;
  }
  if (q.segments) {
    const Range &a = q.segment, &b = k_segment;
    some &= a.high >= b.low && b.high >= a.low && a.high >= 0 && b.high >= 0;
    every &= a.low == b.high && a.high == b.low && a.low == a.high && a.low >= 0;
  }
  return every ? View::kAll : some ? View::kSome : View::kNothing;
}

inline View view(const Mask& mask, const TileTokens& q, const TileTokens& k) {
  return view(mask, q, k.position, k.segment);
}

// Whether any of the queries can see key j.
inline bool meets(const Mask& mask, const TileTokens& q, const TileTokens& k, long j) {
  const int64_t position = q.positions ? k.positions[j] : 0, segment = q.segments ? k.segments[j] : 0;
  return view(mask, q, {position, position}, {segment, segment}) != View::kNothing;
}

// Which of kLanes queries, from x on, see key j: -1 or 0.
inline IVec seen(const Mask& mask, const TileTokens& q, const TileTokens& k, long x, long j) {
  IVec see = IVec{} == 0;
  if (q.positions) {
    const IVec of_q = load<IVec>(q.positions + x), of_k = all(k.positions[j]);
    const IVec after = of_q >= of_k;
    if (mask.window == kUnbounded) {
      see = after;
    } else {
      // As unsigned numbers differences are right for every pair in this order, also those int32 does not hold.
      const UVec window = all(static_cast<uint32_t>(mask.window));
      see = after & ((UVec)(of_q - of_k) < window);
      if (!mask.causal) see |= ~after & ((UVec)(of_k - of_q) < window);
    }
    if (k.positions[j] < mask.prefix) see = IVec{} == 0;
  }
  if (q.segments) {
    const int32_t segment = k.segments[j];
    see = segment < 0 ? IVec{} : see & (load<IVec>(q.segments + x) == all(segment));
  }
  return see;
}

}  // namespace ringjax
