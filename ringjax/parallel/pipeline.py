"""Pipeline parallelism: groups of layers on stages of devices, microbatches passing from one to the next.

All stages run in one program: a group of layers is `jax.vmap`-ed over the stages with `spmd_axis_name="stage"`, what
passes to the next stage is a `ppermute` along the dim that is sharded over them, and everything else is left to the
compiler. The order is that of GPipe (arXiv:1811.06965), or, with more than one group of layers on
each stage, the circular one (the interleaved schedule of arXiv:2104.04473, without its eager backward pass): a
microbatch goes round the stages `rounds` times, one group a visit. M microbatches on P stages take

    M rounds + P - 1 ticks

of which P - 1 are a stage's share of the bubble. The gradient is that of the scan over ticks: the same ticks
backwards.

Letters: P stages, V rounds, M microbatches, C = M / P of them that a stage holds at the start and at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from ringjax.parallel.sharding import activation_sharding, constrain, device_count

AXIS = "stage"
_DIMS = ("stage", "batch", "seq", "embed")  # of what the stages work on at one time, [P, b, S, M]


@dataclass(frozen=True)
class Schedule:
    """Who works on what when.

    Attributes:
      stages: P.
      rounds: V, groups of layers on each stage.
      microbatches: M, a multiple of P.

    Example:
      >>> Schedule(stages=4, rounds=2, microbatches=8).ticks
      19
    """

    stages: int
    rounds: int
    microbatches: int

    def __post_init__(self):
        for name in ("stages", "rounds", "microbatches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.microbatches % self.stages:
            raise ValueError(
                f"microbatches must be a multiple of the stages, so that each stage holds as many of them; got "
                f"{self.microbatches} microbatches and {self.stages} stages"
            )

    @property
    def ticks(self) -> int:
        """Group-sized pieces of work from the first to the last, bubble included."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which a stage has nothing to do."""
        return (self.stages - 1) / self.ticks


def run_pipeline(
    group: Callable[[Any, jax.Array, Any], jax.Array], schedule: Schedule, weights: Any, x_BSM: jax.Array, tokens: Any
) -> jax.Array:
    """Send a batch through all groups of layers.

    Rows of the batch are spread over the stages, data and fsdp axes ("rows" of the sharding table) before and after:
    what comes before and behind the pipeline is shared out over the stages too. No row leaves its data and fsdp
    devices.

    Args:
      group: `(weights of a group, x, tokens) -> x` on one microbatch, [B / M, S, M]. It runs under `jax.vmap`.
      schedule: whose stages are those of the mesh set with `jax.set_mesh`.
      weights: pytree of [V, N / V, ...]: all layers in their order, the second dim spread over the stages.
      x_BSM: the batch. B is a multiple of M and of the rows' devices.
      tokens: pytree of [B, S] or [B], what the layers must know of each token or row; None leaves are left out.

    Returns:
      [B, S, M], in the rows' order.

    Raises:
      ValueError: the schedule is not that of the mesh, of the weights or of the batch.
    """
    P, V, M = schedule.stages, schedule.rounds, schedule.microbatches
    _check(schedule, weights, x_BSM, tokens)
    each, last = M // P, P - 1
    stage_P = jnp.arange(P)
    weights = jax.tree.map(lambda w: _by_stage(w, P), weights)
    tokens = jax.tree.map(lambda x: _replicated(_microbatches(x, P, each)), tokens)

    def visit(weights_V: Any, round_: jax.Array, x: jax.Array, tokens: Any) -> jax.Array:
        return group(jax.tree.map(lambda w: w[0] if V == 1 else w[round_], weights_V), x, tokens)

    def tick(state: tuple, t: jax.Array) -> tuple[tuple, None]:
        waiting, turning, arrived = state
        # What waits moves one stage down at each visit of its place, and reaches the first stage when its turn comes.
        place = t % each
        fresh = waiting[:, place]
        entering = fresh
        if V > 1:
            again = arrived
            if each > 1:
                # Back at the first stage, a microbatch is M - P ticks too early for its next round: it walks along
                # the stages meanwhile.
                corner = t % (each - 1)
                again = _shifted(turning[:, corner], 1)
                turning = _hold(turning.at[:, corner].set(_at(stage_P == 0, arrived, again)), None)
            entering = jnp.where(t < M, fresh, again)
        x = _hold(_at(stage_P == 0, entering, arrived))
        work = jnp.clip(t - stage_P, 0, M * V - 1)
        of_each = jax.tree.map(lambda x: constrain(x[work % M], "stage", *_dims(x)), tokens)
        out = _hold(jax.vmap(visit, spmd_axis_name=AXIS)(weights, work // M, x, of_each))
        waiting = waiting.at[:, place].set(_at(stage_P == last, out, _shifted(fresh, -1)))
        return (_hold(waiting, None), turning, _shifted(out, 1)), None

    waiting = _hold(_microbatches(x_BSM, P, each), None)
    arrived = _hold(jnp.zeros_like(waiting[:, 0]))
    turning = _hold(jnp.zeros_like(waiting[:, 1:]), None) if V > 1 else ()
    (waiting, _, _), _ = jax.lax.scan(tick, (waiting, turning, arrived), jnp.arange(schedule.ticks))
    waiting = jnp.roll(waiting, -last % each, axis=1)  # outputs, and their places, are P - 1 ticks behind inputs
    out_BSM = rearrange(waiting, "P C (d b) S M -> (P d C b) S M", d=device_count("batch"))
    return constrain(out_BSM, "rows", "seq", "embed")


def _check(schedule: Schedule, weights: Any, x_BSM: jax.Array, tokens: Any) -> None:
    """Sizes that do not go together would give wrong numbers: jax clamps indices."""
    P, V, M = schedule.stages, schedule.rounds, schedule.microbatches
    if (stages := device_count("stage")) != P:
        raise ValueError(f"the schedule has {P} stages, and the mesh {stages}; make them equal")
    for shape in {w.shape[:2] for w in jax.tree.leaves(weights)}:
        if len(shape) < 2 or shape[0] != V or shape[1] % P:
            raise ValueError(
                f"weights must be [V, N / V, ...] with V = {V} rounds, and N / V a multiple of {P} stages; got "
                f"{shape} as the first two sizes"
            )
    rows, pieces = x_BSM.shape[0], M * device_count("batch")
    if rows % pieces:
        raise ValueError(
            f"the batch must be a multiple of {M} microbatches times {device_count('batch')} devices along data and "
            f"fsdp = {pieces}; got {rows}"
        )
    if other := {x.shape[0] for x in jax.tree.leaves(tokens)} - {rows}:
        raise ValueError(f"tokens must have as many rows as the batch, {rows}; got {', '.join(map(str, other))}")


def _microbatches(x: jax.Array, stages: int, each: int) -> jax.Array:
    """[B, ...] -> [P, C, B / M, ...]. Each microbatch has rows of every data and fsdp device of one stage."""
    return rearrange(x, "(P d C b) ... -> P C (d b) ...", P=stages, d=device_count("batch"), C=each)


def _by_stage(w: jax.Array, stages: int) -> jax.Array:
    """[V, N / V, ...] -> [P, V, N / (V P), ...]; nothing moves."""
    return rearrange(w, "V (P n) ... -> P V n ...", P=stages)


def _replicated(x: jax.Array) -> jax.Array:
    """[P, C, b, ...] -> [M, b, ...], the same on all stages: a few integers a token, gathered once."""
    x = rearrange(x, "P C b ... -> (P C) b ...")
    return constrain(x, None, *_dims(x))


def _dims(x: jax.Array) -> tuple[str, ...]:
    """What [M, b, S] or [M, b] has behind M."""
    return ("batch", "seq")[: x.ndim - 1]


def _hold(x: jax.Array, *places: None) -> jax.Array:
    """Keep [P, ..., b, S, M] on its devices."""
    return constrain(x, _DIMS[0], *places, *_DIMS[1:])


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """Every stage's array handed to the next one (by = 1) or the one before (by = -1), round the ends.

    One message, said in so many words: of a `jnp.roll` the compiler may make another one in each direction, or, where
    there are data devices besides, two exchanges of everything.
    """
    stages = x.shape[0]
    ways = [(i, (i + by) % stages) for i in range(stages)]
    spec = activation_sharding(jax.sharding.get_abstract_mesh(), *_DIMS).spec
    return jax.shard_map(lambda x: jax.lax.ppermute(x, AXIS, ways), in_specs=spec, out_specs=spec)(x)


def _at(stages: jax.Array, x: jax.Array, otherwise: jax.Array) -> jax.Array:
    """x on some stages, something else on the others."""
    return jnp.where(stages.reshape(-1, *[1] * (x.ndim - 1)), x, otherwise)
