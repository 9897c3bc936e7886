// The two functions that XLA calls: block attention forward and backward on a CPU.
//
// They are the algorithm of FlashAttention-2 (arXiv:2307.08691) on tiles that stay in a core's caches. Work is cut by
// the shapes alone and sums are taken in one order, so that results do not depend on the number of threads.

#include <string>
#include <vector>

#include "backward.h"
#include "engine_float32.h"
#include "forward.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "engine_amx.h"
#endif

namespace ffi = xla::ffi;

namespace ringjax {
namespace {

using Integers = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

Tokens tokens(const Integers& x) {
  if (x.element_count() == 0) return {};
  return {x.typed_data(), x.dimensions()[0], x.dimensions()[1]};
}

Type type_of(const ffi::AnyBuffer& x) {
  switch (x.element_type()) {
    case ffi::BF16: return Type::kBFloat16;
    case ffi::F16: return Type::kFloat16;
    default: return Type::kFloat32;
  }
}

// Everything that forward and backward are told alike.
Problem problem(const ffi::AnyBuffer& q, const ffi::AnyBuffer& kv, const Integers& numbers, const Integers& q_positions,
                const Integers& k_positions, const Integers& q_segments, const Integers& k_segments,
                const Floats& slopes, const ffi::Buffer<ffi::U32>& noise, const ffi::Dictionary& settings) {
  const auto shape = q.dimensions();
  Problem p{};
  p.batch = shape[0], p.kv_heads = shape[1], p.group = shape[2], p.q_len = shape[3], p.dim = shape[4];
  p.k_len = kv.dimensions()[2], p.value_dim = kv.dimensions()[3] - p.dim;
  p.type = type_of(q);
  p.q = static_cast<const char*>(q.untyped_data());
  p.kv = static_cast<const char*>(kv.untyped_data());
  const auto integer = [&](const char* name) -> long { return *settings.get<int64_t>(name); };
  const int32_t* traced = numbers.typed_data();  // what only the running program knows
  p.q_slots = {traced[0], integer("q_size")};
  p.k_slots = {traced[1], integer("k_size")};
  p.by_head = integer("by_head");
  p.mask.order = static_cast<Order>(integer("order"));
  p.mask.causal = integer("causal");
  p.mask.window = integer("window") > 0 ? integer("window") : kUnbounded;
  p.mask.prefix = integer("prefix") >= 0 ? integer("prefix") : -kUnbounded;
  p.mask.stride = integer("stride"), p.mask.by = traced[2];
  p.rule.scale = *settings.get<float>("scale"), p.rule.softcap = *settings.get<float>("softcap");
  p.rule.alibi = slopes.element_count() > 0;
  p.rule.dropped = *settings.get<uint32_t>("dropped"), p.rule.kept_weight = *settings.get<float>("kept_weight");
  p.q_positions = tokens(q_positions), p.k_positions = tokens(k_positions);
  p.q_segments = tokens(q_segments), p.k_segments = tokens(k_segments);
  p.slopes = slopes.typed_data(), p.noise = noise.typed_data();
  return p;
}

// `from` where XLA wants the results, if they are not there already: they are aliased, which it may resolve by a copy.
template <typename From, typename To>
float* moved(const From& from, To& to) {
  if (to->typed_data() != from.typed_data()) std::memcpy(to->typed_data(), from.typed_data(), from.size_bytes());
  return to->typed_data();
}

template <class Engine>
struct EngineType {
  using type = Engine;
};

template <class Engine>
void run_forward(ffi::ThreadPool& pool, const Problem& p, float* out, float* lse) {
  const Forward<Engine> forward(p, out, lse);
  const long tiles = p.q_tiles(), heads = p.batch * p.kv_heads * p.group;
  // Small blocks in smaller pieces, so that there are some for every thread; not smaller than that takes, since each
  // fetches all keys. How queries are cut changes no result.
  const long size = std::max(1L, std::min(kForwardChunk, tiles * heads / (2 * threads(pool))));
  const long pieces = (tiles + size - 1) / size;
  run_all(pool, heads * pieces, [&](long i) {
    // Late queries, which see most under a causal mask, come first.
    const long head = i % heads, first = (pieces - 1 - i / heads) * size;
    forward.run(head / p.group / p.kv_heads, head / p.group % p.kv_heads, head % p.group, first,
                std::min(first + size, tiles));
  });
}

template <class Engine>
void run_backward(ffi::ThreadPool& pool, const Problem& p, const float* lse, const float* delta, const char* dout,
                  float* dq, float* dkv) {
  const Backward<Engine> backward(p, lse, delta, dout, dq);
  const long heads = p.batch * p.kv_heads, chunks = backward.chunks();
  std::vector<Turn::Tiles> tiles(heads * chunks);
  run_all(pool, heads * chunks, [&](long i) {
    // Late queries, which see most under a causal mask, come first.
    const long head = i % heads;
    Turn turn(i < heads ? nullptr : &tiles[i - heads], tiles[i]);
    backward.run(head / p.kv_heads, head % p.kv_heads, chunks - 1 - i / heads, dkv, turn);
  });
}

// Calls run(engine type) with the engine for these arrays on this CPU.
template <class Run>
void with_engine(const Problem& p, Run run) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if (p.type == Type::kBFloat16 && amx_permitted()) return run(EngineType<AmxEngine>{});
#endif
  run(EngineType<Float32Engine>{});
}

template <typename F>
ffi::Error reported(F run) {
  try {
    run();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("attention kernel: ") + error.what());
  }
}

ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, Integers numbers, Integers q_positions,
                   Integers k_positions, Integers q_segments, Integers k_segments, Floats slopes,
                   ffi::Buffer<ffi::U32> noise, Floats before_out, Floats before_lse, ffi::Result<Floats> out,
                   ffi::Result<Floats> lse, ffi::Dictionary settings) {
  return reported([&] {
    const Problem p = problem(q, kv, numbers, q_positions, k_positions, q_segments, k_segments, slopes, noise, settings);
    float *to_out = moved(before_out, out), *to_lse = moved(before_lse, lse);
    with_engine(p, [&](auto engine) { run_forward<typename decltype(engine)::type>(pool, p, to_out, to_lse); });
  });
}

ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, Integers numbers, Integers q_positions,
                    Integers k_positions, Integers q_segments, Integers k_segments, Floats slopes,
                    ffi::Buffer<ffi::U32> noise, Floats lse, Floats delta, ffi::AnyBuffer dout, Floats before_dq,
                    Floats before_dkv, ffi::Result<Floats> dq, ffi::Result<Floats> dkv, ffi::Dictionary settings) {
  return reported([&] {
    const Problem p = problem(q, kv, numbers, q_positions, k_positions, q_segments, k_segments, slopes, noise, settings);
    float *to_dq = moved(before_dq, dq), *to_dkv = moved(before_dkv, dkv);
    const char* of_out = static_cast<const char*>(dout.untyped_data());
    with_engine(p, [&](auto engine) {
      run_backward<typename decltype(engine)::type>(pool, p, lse.typed_data(), delta.typed_data(), of_out, to_dq, to_dkv);
    });
  });
}

}  // namespace
}  // namespace ringjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_attention_forward, ringjax::forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ringjax::Floats>()
                                  .Ret<ringjax::Floats>()
                                  .Ret<ringjax::Floats>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_attention_backward, ringjax::backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Integers>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ringjax::Floats>()
                                  .Arg<ringjax::Floats>()
                                  .Ret<ringjax::Floats>()
                                  .Ret<ringjax::Floats>()
                                  .Attrs());
