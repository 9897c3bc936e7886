// What happens to a tile of scores, [keys][kQueries], between the products and the exponential, and to weights after
// it. The formulas are those of the package's scores.py.
#pragma once

#include "tiles.h"

namespace ringjax {

inline UVec mix(UVec x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Softcap and ALiBi. `slopes` becomes d capped / d u; null = not asked for.
template <typename K>
void shape_scores(const Rule& rule, const QuerySide& q, const K& k, Span keys, float* scores, float* slopes) {
  if (rule.in_unit_of_scale()) return;
  for (long j = keys.first; j < keys.last; j++, scores += kQueries) {
    for (long x = 0; x < q.lanes; x += kLanes) {
      Vec u = load(scores + x) * rule.scale;
      if (rule.softcap != 0) {
        const Vec bounded = tanh(u / rule.softcap);
        if (slopes) store(slopes + (j - keys.first) * kQueries + x, 1.0f - bounded * bounded);
        u = rule.softcap * bounded;
      }
      if (rule.alibi) {
        const IVec of_q = load<IVec>(q.scored + x), of_k = all(k.tokens.scored[j]);
        // Positions far apart overflow int32, and their distance is right as an unsigned number.
        const UVec distance = of_q > of_k ? (UVec)(of_q - of_k) : (UVec)(of_k - of_q);
        u -= q.slope * __builtin_convertvector(distance, Vec);
      }
      store(scores + x, u);
    }
  }
}

// Scores of what is not seen become -inf.
template <typename K>
void hide(const Mask& mask, const QuerySide& q, const K& k, Span keys, float* scores) {
  for (long j = keys.first; j < keys.last; j++, scores += kQueries) {
    for (long x = 0; x < q.lanes; x += kLanes) {
      store(scores + x, seen(mask, q.tokens, k.tokens, x, j) ? load(scores + x) : all(-kInfinity));
    }
  }
}

// Weights of pairs that are seen and broken become NaN.
template <typename K>
void poison(const Mask& mask, const QuerySide& q, const K& k, Span keys, float* weights) {
  if (!q.broken && !k.broken) return;
  for (long j = keys.first; j < keys.last; j++, weights += kQueries) {
    for (long x = 0; x < q.lanes; x += kLanes) {
      const IVec bad = seen(mask, q.tokens, k.tokens, x, j) & (load<IVec>(q.bad + x) | all(k.bad[j] ? -1 : 0));
      store(weights + x, bad ? all(kNaN) : load(weights + x));
    }
  }
}

// What dropout multiplies weights by.
template <typename K>
void keep(const Rule& rule, const QuerySide& q, const K& k, Span keys, float* kept) {
  for (long x = 0; x < q.lanes; x += kLanes) {
    const UVec row = mix(q.noise + load<UVec>(q.scored + x) * 0xC2B2AE3Du);
    for (long j = keys.first; j < keys.last; j++) {
      const UVec bits = mix(row ^ (static_cast<uint32_t>(k.tokens.scored[j]) * 0x9E3779B1u));
      store(kept + (j - keys.first) * kQueries + x, bits >= all(rule.dropped) ? all(rule.kept_weight) : Vec{});
    }
  }
}

}  // namespace ringjax
