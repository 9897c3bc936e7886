// What one call is about: shapes, arrays, mask and score rule. Letters as in the package: B batch, K key/value heads,
// G query heads that share one, L slots, D and Dv head dims. x counts queries of a tile, s keys of a tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace ringjax {

// Of a tile: the width of a tile of scores. A whole number of the blocks that product.h multiplies at a time.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr long kQueries = 96;
#else
constexpr long kQueries = 64;
#endif
// Tiles of queries that share a loaded tile of keys.
constexpr long kForwardChunk = (1024 + kQueries - 1) / kQueries, kBackwardChunk = (512 + kQueries - 1) / kQueries;
constexpr long kUnbounded = int64_t{1} << 40;    // more than any two int32 positions are apart

enum class Type { kFloat32, kBFloat16, kFloat16 };
enum class Order { kAll = 0, kSlots = 1, kAny = 2 };

// Slots of a block that a call is about.
struct Slots {
  long start, size;
};

// Integers of the slots, one row for each sequence or one for all; null = not given.
struct Tokens {
  const int32_t* data = nullptr;
  long rows = 0, size = 0;

  const int32_t* of(long sequence) const { return data ? data + (rows > 1 ? sequence : 0) * size : nullptr; }
};

struct Mask {
  Order order;
  bool causal;
  long window;  // kUnbounded = none
  long prefix;  // keys at lower positions are visible to all
  long stride, by;  // for Order::kSlots: position of query slot i is stride * i + by, of key slot j stride * j

  bool compares_positions() const { return order != Order::kAll && (causal || window < kUnbounded); }
};

struct Rule {
  float scale;
  float softcap;  // 0 = none
  bool alibi;
  uint32_t dropped;  // of 2^32 weights; 0 = none
  float kept_weight;

  bool needs_positions() const { return alibi || dropped; }
  // Where nothing but the scale acts on the products, they are scores in its unit and the exponential multiplies.
  bool in_unit_of_scale() const { return scale > 0 && softcap == 0 && !alibi; }
  float unit() const { return in_unit_of_scale() ? scale : 1.0f; }
};

struct Problem {
  long batch, kv_heads, group, q_len, k_len, dim, value_dim;
  Type type;
  const char* q;
  const char* kv;
  bool by_head;
  Slots q_slots, k_slots;
  Mask mask;
  Rule rule;
  Tokens q_positions, k_positions, q_segments, k_segments;
  const float* slopes;    // [B, K, G]
  const uint32_t* noise;  // [B, K, G]

  long q_tiles() const { return (q_slots.size + kQueries - 1) / kQueries; }
  long row(long sequence, long head, long g) const { return ((sequence * kv_heads + head) * group + g) * q_len; }

  // Arrays with a head dim lie by head, [B, K, G, L, D] and [B, K, L, D + Dv], or by token, as the operator's caller
  // has them: [B, L, K, G, D] and [B, L, K, D + Dv].
  long q_step() const { return by_head ? 1 : kv_heads * group; }
  long query(long sequence, long slot, long head, long g) const {
    return by_head ? row(sequence, head, g) + slot : (sequence * q_len + slot) * q_step() + head * group + g;
  }
  long key_step() const { return by_head ? 1 : kv_heads; }
  long key(long sequence, long slot, long head) const {
    return by_head ? (sequence * kv_heads + head) * k_len + slot : (sequence * k_len + slot) * kv_heads + head;
  }
};

inline long item_size(Type type) { return type == Type::kFloat32 ? 4 : 2; }

inline long round_up(long x, long unit) { return (x + unit - 1) / unit * unit; }

}  // namespace ringjax
