// The share of a call's keys in the gradients, for some of the queries.
#pragma once

#include <cmath>

#include "parallel.h"
#include "scores.h"

namespace ringjax {

template <class Engine>
class Backward {
 public:
  // lse and delta are of [B, K, G, Lq], dout of the type of q.
  Backward(const Problem& p, const float* lse, const float* delta, const char* dout, float* dq)
      : p_(p), lse_(lse), delta_(delta), dout_(dout), dq_(dq) {}

  // Chunks of the queries of all heads that share a key/value head.
  long chunks() const { return per_head() * p_.group; }

  // One of them: what its queries give is added to the gradients, in turn with the other chunks.
  void run(long sequence, long head, long chunk, float* dkv, Turn& turn) const {
    const long first = chunk % per_head() * kBackwardChunk, last = std::min(first + kBackwardChunk, p_.q_tiles());
    run_chunk(sequence, head, chunk / per_head(), first, last, dkv, turn);
  }

 private:
  struct Tile {
    QuerySide side;
    float lse[kQueries], delta[kQueries];
    typename Engine::Queries queries;
  };

  // Tiles of [keys][kQueries].
  struct Room {
    float *weights, *ds, *kept, *slopes;
  };

  long per_head() const { return (p_.q_tiles() + kBackwardChunk - 1) / kBackwardChunk; }

  void run_chunk(long sequence, long head, long g, long first, long last, float* dkv, Turn& turn) const {
    constexpr long kKeys = Engine::kBackwardKeys;
    Scratch& scratch = Scratch::fresh();
    const Engine engine(p_, scratch);
    Tile* tiles = scratch.take<Tile>(last - first);
    for (long i = 0; i < last - first; i++) prepare(engine, scratch, tiles[i], sequence, head, g, first + i);

    auto& side = *scratch.take<KeySide<kKeys>>(1);
    auto keys = engine.keys(scratch, kKeys, true);
    auto gradients = engine.gradients(scratch, kKeys);
    Room room{scratch.take<float>(kKeys * kQueries), scratch.take<float>(kKeys * kQueries), nullptr, nullptr};
    if (p_.rule.dropped) room.kept = scratch.take<float>(kKeys * kQueries);
    if (p_.rule.softcap != 0) room.slopes = scratch.take<float>(kKeys * kQueries);
    for (long key = 0; key < p_.k_slots.size; key += kKeys) {
      side.start(p_, sequence, head, key);
      for (long i = 0; i < last - first; i++) {
        const View seen = view(p_.mask, tiles[i].side.tokens, side.tokens);
        if (seen == View::kNothing) continue;
        if (!side.loaded) {
          fetch_keys(engine, p_, side, keys, true);
          engine.clear(gradients, kKeys);
        }
        attend(engine, tiles[i], side, keys, seen, room, gradients);
      }
      turn.await(key / kKeys);
      if (side.loaded) add_to(engine, side, gradients, dkv);
      turn.done(key / kKeys);
    }
    float* row = scratch.take<float>(engine.width());
    for (long i = 0; i < last - first; i++) {
      for (long x = 0; x < tiles[i].side.count; x++) {
        const float* sum = engine.sum_row(tiles[i].queries, x, true, row);
        float* dq = dq_ + tiles[i].side.at(x) * p_.dim;
        for (long d = 0; d < p_.dim; d++) dq[d] += sum[d];
      }
    }
  }

  void prepare(const Engine& engine, Scratch& scratch, Tile& tile, long sequence, long head, long g, long number) const {
    QuerySide& side = tile.side;
    side.start(p_, sequence, head, g, number * kQueries);
    for (long i = 0; i < kQueries; i++) {
      tile.lse[i] = kInfinity;  // of rows that see nothing, and of those that fill the tile: all weights are 0
      tile.delta[i] = 0;
      if (i >= side.count) continue;
      const float lse = lse_[side.row + i], delta = delta_[side.row + i];
      if (std::isnan(lse) || !std::isfinite(delta)) {
        side.mark(i);
      } else if (lse != -kInfinity) {
        tile.lse[i] = static_cast<float>(lse * kLog2e);
        tile.delta[i] = delta;
      }
    }
    tile.queries = engine.queries(scratch, true);
    fetch_queries(engine, p_, side, dout_, tile.queries);
  }

  template <typename Side, typename Keys, typename Gradients>
  void attend(const Engine& engine, Tile& tile, const Side& side, const Keys& keys, View seen, const Room& room,
              Gradients& gradients) const {
    const Span keys_seen = span(p_.mask, tile.side, side, seen, Engine::kKeyStep);
    const long count = keys_seen.last - keys_seen.first;
    if (count <= 0) return;
    engine.score(tile.side, keys, tile.queries, keys_seen, room.weights);
    engine.score_values(tile.side, keys, tile.queries, keys_seen, room.ds);
    shape_scores(p_.rule, tile.side, side, keys_seen, room.weights, room.slopes);
    if (seen == View::kSome) hide(p_.mask, tile.side, side, keys_seen, room.weights);
    if (room.kept) keep(p_.rule, tile.side, side, keys_seen, room.kept);
    differentiate(tile, count, room);
    poison(p_.mask, tile.side, side, keys_seen, room.weights);
    poison(p_.mask, tile.side, side, keys_seen, room.ds);
    engine.add_gradients(tile.side, keys, tile.queries, keys_seen, room.weights, room.ds, gradients);
  }

  // Scores and products of values become weights and gradients of the products of queries and keys.
  void differentiate(const Tile& tile, long count, const Room& room) const {
    const Factor unit(p_.rule.unit() * kLog2e);
    for (long j = 0; j < count; j++) {
#pragma GCC unroll 4
      for (long x = 0; x < kQueries; x += kLanes) {
        const long at = j * kQueries + x;
        // No score is above the lse it is part of, but for rounding, which matters if scores are large.
        const Vec power = unit.power(load(room.weights + at), load(tile.lse + x));
        const Vec weight = exp2(power > 0.0f ? Vec{} : power);
        Vec dp = load(room.ds + at), kept = weight;
        if (room.kept) {
          const Vec factor = load(room.kept + at);
          dp *= factor;
          kept *= factor;
        }
        Vec ds = weight * (dp - load(tile.delta + x)) * p_.rule.scale;
        if (room.slopes) ds *= load(room.slopes + at);
        // Products of large finite numbers overflow, and 0 times that would be NaN where nothing is seen.
        store(room.weights + at, kept);
        store(room.ds + at, weight == 0.0f ? Vec{} : ds);
      }
    }
  }

  template <typename Side, typename Gradients>
  void add_to(const Engine& engine, const Side& side, const Gradients& gradients, float* dkv) const {
    for (long j = 0; j < side.count; j++) {
      const float *dk = gradients.dk + j * engine.width(), *dv = gradients.dv + j * engine.value_width();
      float* to = dkv + side.at(j) * (p_.dim + p_.value_dim);
      for (long d = 0; d < p_.dim; d++) to[d] += dk[d];
      for (long d = 0; d < p_.value_dim; d++) to[p_.dim + d] += dv[d];
    }
  }

  const Problem& p_;
  const float *lse_, *delta_;
  const char* dout_;
  float* dq_;
};

}  // namespace ringjax
