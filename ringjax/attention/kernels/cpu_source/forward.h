// Attention of some queries over all keys of a call, merged with what they have seen before.
#pragma once

#include <cmath>

#include "scores.h"

namespace ringjax {

// Of a tile of queries: the largest score so far, in powers of two, and the sum of the weights relative to it.
struct Softmax {
  float top[kQueries], total[kQueries], factors[kQueries];

  void start() {
    std::fill_n(top, kQueries, -kInfinity);
    std::fill_n(total, kQueries, 0.0f);
  }
};

constexpr long kShortSum = 16;

// Scores become weights, for N vectors of queries; `unit` turns scores into powers of two.
template <int N>
inline void weigh(Softmax& softmax, float* scores, long keys, long x, Factor unit) {
  Vec largest[N], shift[N], total[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) largest[i] = all(-kInfinity);
  for (long j = 0; j < keys; j++) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) largest[i] = larger(load(scores + j * kQueries + x + i * kLanes), largest[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const Vec old = load(softmax.top + x + i * kLanes), top = larger(unit.power(largest[i], Vec{}), old);
    shift[i] = top == -kInfinity ? Vec{} : top;
    const Vec factor = exp2(old - shift[i]);
    store(softmax.top + x + i * kLanes, top);
    store(softmax.factors + x + i * kLanes, factor);
    total[i] = load(softmax.total + x + i * kLanes) * factor;
  }
  // Sums of a few weights are added up: rounding errors grow with the length of a sum.
  for (long first = 0; first < keys; first += kShortSum) {
    Vec sum[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) sum[i] = Vec{};
    for (long j = first; j < std::min(first + kShortSum, keys); j++) {
      float* row = scores + j * kQueries + x;
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const Vec weight = exp2(unit.power(load(row + i * kLanes), shift[i]));
        sum[i] += weight;
        store(row + i * kLanes, weight);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) total[i] += sum[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) store(softmax.total + x + i * kLanes, total[i]);
}

inline void weigh_all(Softmax& softmax, float* scores, long keys, long lanes, Factor unit) {
  long x = 0;
  for (; x + 4 * kLanes <= lanes; x += 4 * kLanes) weigh<4>(softmax, scores, keys, x, unit);
  for (; x < lanes; x += kLanes) weigh<1>(softmax, scores, keys, x, unit);
}

template <class Engine>
class Forward {
 public:
  Forward(const Problem& p, float* out, float* lse) : p_(p), out_(out), lse_(lse) {}

  // Tiles [first, last) of the queries of one head, at most kForwardChunk.
  void run(long sequence, long head, long g, long first, long last) const {
    Scratch& scratch = Scratch::fresh();
    const Engine engine(p_, scratch);
    Tile* tiles = scratch.take<Tile>(last - first);
    for (long i = 0; i < last - first; i++) prepare(engine, scratch, tiles[i], sequence, head, g, first + i);

    auto& side = *scratch.take<KeySide<Engine::kForwardKeys>>(1);
    auto keys = engine.keys(scratch, Engine::kForwardKeys, false);
    float* scores = scratch.take<float>(Engine::kForwardKeys * kQueries);
    float* kept = p_.rule.dropped ? scratch.take<float>(Engine::kForwardKeys * kQueries) : nullptr;
    for (long key = 0; key < p_.k_slots.size; key += Engine::kForwardKeys) {
      side.start(p_, sequence, head, key);
      for (long i = 0; i < last - first; i++) {
        const View seen = view(p_.mask, tiles[i].side.tokens, side.tokens);
        if (seen == View::kNothing) continue;
        if (!side.loaded) fetch_keys(engine, p_, side, keys, false);
        attend(engine, tiles[i], side, keys, seen, scores, kept);
      }
    }
    float* row = scratch.take<float>(engine.value_width());
    for (long i = 0; i < last - first; i++) finish(engine, tiles[i], row);
  }

 private:
  struct Tile {
    QuerySide side;
    Softmax softmax;
    typename Engine::Queries queries;
  };

  void prepare(const Engine& engine, Scratch& scratch, Tile& tile, long sequence, long head, long g, long number) const {
    tile.side.start(p_, sequence, head, g, number * kQueries);
    tile.softmax.start();
    tile.queries = engine.queries(scratch, false);
    fetch_queries(engine, p_, tile.side, nullptr, tile.queries);
  }

  template <typename Side, typename Keys>
  void attend(const Engine& engine, Tile& tile, const Side& side, const Keys& keys, View seen, float* scores,
              float* kept) const {
    const Span keys_seen = span(p_.mask, tile.side, side, seen, Engine::kKeyStep);
    const long count = keys_seen.last - keys_seen.first;
    if (count <= 0) return;
    engine.score(tile.side, keys, tile.queries, keys_seen, scores);
    shape_scores(p_.rule, tile.side, side, keys_seen, scores, nullptr);
    if (seen == View::kSome) hide(p_.mask, tile.side, side, keys_seen, scores);
    weigh_all(tile.softmax, scores, count, tile.side.lanes, Factor(p_.rule.unit() * kLog2e));
    if (tile.side.broken || side.broken) {
      poison(p_.mask, tile.side, side, keys_seen, scores);
      for (long j = 0; j < count; j++) {
        for (long x = 0; x < kQueries; x++) {
          if (std::isnan(scores[j * kQueries + x])) tile.softmax.total[x] = kNaN;
        }
      }
    }
    if (kept) {
      keep(p_.rule, tile.side, side, keys_seen, kept);
      for (long i = 0; i < count * kQueries; i++) scores[i] *= kept[i];
    }
    engine.add_values(tile.side, keys, tile.queries, keys_seen, scores, tile.softmax.factors);
  }

  // The merge of softmax.py with what is in the results.
  void finish(const Engine& engine, const Tile& tile, float* room) const {
    const QuerySide& side = tile.side;
    float lse[kQueries], share[kQueries], old_share[kQueries];
    std::fill_n(lse, kQueries, -kInfinity);
    std::memcpy(lse, lse_ + side.row, side.count * sizeof *lse);
    const Factor unit(kLog2e);
    for (long x = 0; x < side.lanes; x += kLanes) {
      const Vec old = load(lse + x), top = load(tile.softmax.top + x), total = load(tile.softmax.total + x);
      const Vec most = larger(top, unit.power(old, Vec{}));
      const Vec weight = exp2(top - most), old_weight = exp2(unit.power(old, most));
      const Vec sum = weight * total + old_weight;
      // What saw nothing here has a total of 0.
      store(lse + x, total == 0.0f ? old : most * static_cast<float>(kLn2) + log(sum));
      store(share + x, weight / sum);
      store(old_share + x, old_weight / sum);
    }
    std::memcpy(lse_ + side.row, lse, side.count * sizeof *lse);
    for (long i = 0; i < side.count; i++) {
      if (tile.softmax.total[i] == 0) continue;
      const float* row = engine.sum_row(tile.queries, i, false, room);
      float* out = out_ + side.at(i) * p_.value_dim;
      for (long d = 0; d < p_.value_dim; d++) out[d] = out[d] * old_share[i] + row[d] * share[i];
    }
  }

  const Problem& p_;
  float *out_, *lse_;
};

}  // namespace ringjax
