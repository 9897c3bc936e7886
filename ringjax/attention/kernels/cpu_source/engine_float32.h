// The products of attention in float32, on any CPU. Scores lie as [keys][queries]: keys and values are then used as
// they are stored, only queries are transposed, and what is per query is in lanes, so that no lane is ever added to
// another.
#pragma once

#include "product.h"
#include "tiles.h"

namespace ringjax {

class Float32Engine {
 public:
  static constexpr long kForwardKeys = kQueries == 96 ? 96 : 128, kBackwardKeys = 64;  // of a tile
  static constexpr long kKeyStep = 1;                            // what the first key of a span is a multiple of

  struct Keys {
    float *k, *v;
  };
  struct Queries {
    float *q_t, *dout_t;  // [width][kQueries]
    float *q, *dout;      // [kQueries][width], in the backward pass only
    float* sum;           // of weighted values, [kQueries][value width], or the gradient of q
  };

  Float32Engine(const Problem& p, Scratch&)
      : p_(p), width_(round_up(p.dim, kLanes)), value_width_(round_up(p.value_dim, kLanes)) {}

  Keys keys(Scratch& scratch, long tile, bool) const {
    return {scratch.take<float>(tile * width_), scratch.take<float>(tile * value_width_)};
  }

  // Fetches all keys of a tile but those marked as bad; whether all that was fetched is finite.
  template <typename Side>
  bool load_keys(const Side& side, Keys& keys, bool) const {
    const long size = item_size(p_.type), bytes = size * (p_.dim + p_.value_dim);
    for (long j = 0; j < side.count; j++) {
      const char* row = p_.kv + side.at(j) * bytes;
      const bool bad = side.bad[j];
      to_float(p_.type, row, bad ? 0 : p_.dim, keys.k + j * width_, width_);
      to_float(p_.type, row + p_.dim * size, bad ? 0 : p_.value_dim, keys.v + j * value_width_, value_width_);
    }
    return finite(keys.k, side.count * width_) && finite(keys.v, side.count * value_width_);
  }

  Queries queries(Scratch& scratch, bool backward) const {
    Queries q{};
    q.q_t = scratch.take<float>(width_ * kQueries);
    q.q = scratch.take<float>(width_ * kQueries);
    q.sum = scratch.zeros<float>((backward ? width_ : value_width_) * kQueries);
    if (backward) {
      q.dout_t = scratch.take<float>(value_width_ * kQueries);
      q.dout = scratch.take<float>(value_width_ * kQueries);
    }
    return q;
  }

  // Likewise.
  bool load_queries(const QuerySide& side, const char* dout, Queries& q) const {
    bool whole = load_rows(side, p_.q, p_.dim, q.q, q.q_t, width_);
    if (dout) whole &= load_rows(side, dout, p_.value_dim, q.dout, q.dout_t, value_width_);
    return whole;
  }

  void score(const QuerySide& side, const Keys& keys, const Queries& q, Span span, float* scores) const {
    of_queries(side, keys.k, width_, q.q_t, span, scores);
  }

  void score_values(const QuerySide& side, const Keys& keys, const Queries& q, Span span, float* products) const {
    of_queries(side, keys.v, value_width_, q.dout_t, span, products);
  }

  // sum = factors * sum + weights^T values
  void add_values(const QuerySide& side, const Keys& keys, Queries& q, Span span, const float* weights,
                  const float* factors) const {
    const float* v = keys.v + span.first * value_width_;
    const long depth = span.last - span.first;
    multiply({weights, 1, kQueries, v, value_width_, q.sum, value_width_, depth, true, factors}, side.count,
             value_width_);
  }

  struct Gradients {
    float *dk, *dv;
  };

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
    multiply({weights, kQueries, 1, q.dout, value_width_, of.dv + span.first * value_width_, value_width_, side.count,
              true, nullptr},
             count, value_width_);
    multiply({ds, kQueries, 1, q.q, width_, of.dk + span.first * width_, width_, side.count, true, nullptr}, count,
             width_);
    multiply({ds, 1, kQueries, keys.k + span.first * width_, width_, q.sum, width_, count, true, nullptr}, side.count,
             width_);
  }

  // Row i of what has been summed, times a factor, to `to`.
  const float* sum_row(const Queries& q, long i, bool backward, float*) const {
    return q.sum + i * (backward ? width_ : value_width_);
  }

  long width() const { return width_; }
  long value_width() const { return value_width_; }

 private:
  void of_queries(const QuerySide& side, const float* rows, long width, const float* queries, Span span,
                  float* to) const {
    multiply({rows + span.first * width, width, 1, queries, kQueries, to, kQueries, width, false, nullptr},
             span.last - span.first, side.lanes);
  }

  bool load_rows(const QuerySide& side, const char* from, long dim, float* rows, float* transposed, long width) const {
    const long bytes = item_size(p_.type) * dim;
    for (long i = 0; i < kQueries; i++) {
      const bool absent = i >= side.count || side.bad[i];
      to_float(p_.type, from + (absent ? 0 : side.at(i)) * bytes, absent ? 0 : dim, rows + i * width, width);
    }
    for (long i = 0; i < kQueries; i += kLanes) {
      for (long d = 0; d < width; d += kLanes) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (long x = 0; x < kLanes; x++) square[x] = load(rows + (i + x) * width + d);
        transpose(square);
#pragma GCC unroll 16
        for (long x = 0; x < kLanes; x++) store(transposed + (d + x) * kQueries + i, square[x]);
      }
    }
    return finite(rows, kQueries * width);
  }

  const Problem& p_;
  const long width_, value_width_;
};

}  // namespace ringjax
