"""The pipeline against its layers one after another, its ticks and its messages."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import executed, trips

from ringjax.config import MeshConfig
from ringjax.parallel import Schedule, activation_sharding, constrain, make_mesh, run_pipeline

LAYERS, BATCH, SEQ, DIM = 16, 16, 4, 8
SCHEDULES = [(2, 1, 2), (2, 2, 2), (2, 2, 8), (4, 1, 4), (4, 1, 16), (4, 2, 4), (4, 4, 8), (4, 2, 16)]


def test_ticks_and_bubble():
    assert [Schedule(*case).ticks for case in SCHEDULES] == [3, 5, 17, 7, 19, 11, 35, 35]
    assert Schedule(4, 1, 4).bubble == 3 / 7
    assert Schedule(4, 4, 8).bubble == 3 / 35
    assert Schedule(1, 1, 1).bubble == 0


def test_microbatches_must_fill_the_stages():
    with pytest.raises(ValueError, match=r"a multiple of the stages, .* got 6 microbatches and 4 stages"):
        Schedule(stages=4, rounds=1, microbatches=6)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_numbers_of_a_schedule_are_counts(value):
    for name in ("stages", "rounds", "microbatches"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
            Schedule(**{"stages": 1, "rounds": 1, "microbatches": 1} | {name: value})


@pytest.mark.parametrize(
    ("schedule", "shape", "rows", "message"),
    [
        ((2, 1, 2), (2, 2), 8, r"V = 1 rounds.*got \(2, 2\)"),  # half of the layers would never run
        ((2, 2, 2), (1, 4), 8, r"V = 2 rounds.*got \(1, 4\)"),
        ((2, 2, 2), (3, 2), 8, r"V = 2 rounds.*got \(3, 2\)"),
        ((2, 1, 2), (1, 3), 8, r"a multiple of 2 stages; got \(1, 3\)"),
        ((4, 1, 4), (1, 4), 8, "the schedule has 4 stages, and the mesh 2"),
        ((2, 1, 4), (1, 2), 6, r"a multiple of 4 microbatches times 1 devices.*got 6"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule, shape, rows, message):
    weights, x = jnp.ones((*shape, DIM, DIM)), jnp.ones((rows, SEQ, DIM))
    with jax.set_mesh(make_mesh(MeshConfig(stage=2))), pytest.raises(ValueError, match=message):
        run_pipeline(group, Schedule(*schedule), weights, x, (jnp.ones((rows, SEQ)), None))


def test_tokens_of_another_batch_are_refused():
    weights, x = jnp.ones((1, 2, DIM, DIM)), jnp.ones((8, SEQ, DIM))
    with (
        jax.set_mesh(make_mesh(MeshConfig(stage=2))),
        pytest.raises(ValueError, match="as many rows as the batch, 8; got 4"),
    ):
        run_pipeline(group, Schedule(2, 1, 2), weights, x, (jnp.ones((4, SEQ)), None))


def layer(x, weight, known):
    """Each layer and row is another function, and rows do not mix."""
    shift, _ = known
    return jnp.tanh(x @ weight + shift[..., None].astype(x.dtype) / 10)


def group(weights, x, known):
    x, _ = jax.lax.scan(
        lambda x, weight: (constrain(layer(x, weight, known), "batch", "seq", "embed"), None), x, weights
    )
    return x


@pytest.fixture(scope="module")
def case():
    """Weights, batch, what is known of tokens, and the cotangent."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, DIM, DIM)).astype(np.float32) / np.sqrt(DIM)
    x, dout = rng.normal(size=(2, BATCH, SEQ, DIM)).astype(np.float32)
    return weights, x, rng.integers(0, 9, (BATCH, SEQ)), dout


@pytest.fixture(scope="module")
def want(case):
    """Result and gradients of the layers one after another."""
    weights, x, shift, dout = case
    out, pullback = jax.vjp(lambda w, x: group(w, x, (shift, None)), weights, x)
    return out, *pullback(dout)


def compiled(case, schedule, **axes):
    """The program that runs the pipeline forwards and backwards, and what it is given."""
    weights, x, shift, dout = case
    mesh = make_mesh(MeshConfig(stage=schedule.stages, **axes))
    with jax.set_mesh(mesh):
        rows = activation_sharding(mesh, "rows", "seq", "embed")
        x, dout = jax.device_put((x, dout), rows)
        shift = jax.device_put(shift, activation_sharding(mesh, "rows", "seq"))
        weights = jax.device_put(
            weights.reshape(schedule.rounds, -1, DIM, DIM),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "stage")),
        )

        @jax.jit
        def run(weights, x, shift, dout):
            out, pullback = jax.vjp(lambda w, x: run_pipeline(group, schedule, w, x, (shift, None)), weights, x)
            return out, *pullback(dout)

        return run.lower(weights, x, shift, dout).compile(), (weights, x, shift, dout)


@pytest.mark.parametrize("sizes", SCHEDULES, ids=str)
def test_results_ticks_and_messages(case, want, sizes):
    schedule = Schedule(*sizes)
    program, inputs = compiled(case, schedule)
    for got, expected in zip(program(*inputs), want, strict=True):
        np.testing.assert_allclose(np.asarray(got).reshape(expected.shape), expected, rtol=2e-5, atol=2e-6)
    assert schedule.ticks in trips(program)
    microbatch = (1, BATCH // schedule.microbatches, SEQ, DIM)
    # A tick hands on what the stages made and what waits to begin or has ended, and, when microbatches go round more
    # than once and are more than the stages, those that are between two rounds.
    messages = 2 + (schedule.rounds > 1 and schedule.microbatches > schedule.stages)
    found = executed(program)
    permutes = Counter({key: count for key, count in found.items() if key[0] == "collective-permute"})
    assert permutes == {("collective-permute", "f32", microbatch): 2 * schedule.ticks * messages}
    rest = {key for key in found if key[0] != "collective-permute"}
    assert all(kind == "all-gather" and dtype == "s32" for kind, dtype, _ in rest), rest


def test_rows_stay_with_their_data_devices(case, want):
    program, inputs = compiled(case, Schedule(2, 2, 4), data=2, fsdp=2, seq=2)
    for got, expected in zip(program(*inputs), want, strict=True):
        np.testing.assert_allclose(np.asarray(got).reshape(expected.shape), expected, rtol=2e-5, atol=2e-6)
    moved = {(kind, dtype) for kind, dtype, _ in executed(program)}
    # Gradients of weights are summed over the rows' devices; nothing of the batch moves but along the stages.
    assert moved == {("collective-permute", "f32"), ("all-gather", "s32"), ("all-reduce", "f32")}
