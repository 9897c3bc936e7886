"""Loss, gradient norm and every gradient on every axis, every pair of axes and all of them, as on one device."""

import itertools
import math
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hlo import executed, shapes, weights_in_use

from ringjax.config import ModelConfig
from ringjax.parallel import AXES, STACKED

pytestmark = [pytest.mark.spread, pytest.mark.usefixtures("quick_compiler")]

# Dims are multiples of what four devices of any axis, or two of all, need, and all different.
WIDE = ModelConfig(layers=8, dim=32, heads=8, kv_heads=4, head_dim=6, mlp_dim=40)
WINDOWS = WIDE.model_copy(update={"window": (9, None)})
ALL = dict.fromkeys(AXES, 2)
MESHES = [{axis: size} for axis, size in itertools.product(AXES, (2, 4))]
MESHES += [{one: 2, two: 2} for one, two in itertools.combinations(AXES, 2)]
BY_DEFAULT = ({"stage": 2}, {"stage": 2, "seq": 2})


def name(sizes):
    return " ".join(f"{axis}{size}" for axis, size in sizes.items())


def flat(gradients):
    """Every gradient by its path, as rows of layers whatever the rounds."""
    leaves = jax.tree.leaves_with_path(gradients, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def rows(leaf):
        stacked = leaf.get_metadata("dims")[: len(STACKED)] == STACKED
        return np.asarray(leaf[...]).reshape(-1, *leaf.shape[2:]) if stacked else np.asarray(leaf[...])

    return {jax.tree_util.keystr(path): rows(leaf) for path, leaf in leaves}


def check(got, want):
    """The bars of a train step: relative, by norm."""
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    found, right = flat(got.gradients), flat(want.gradients)
    assert found.keys() == right.keys()
    norms = [np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in all_.values())) for all_ in (found, right)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for key, expected in right.items():
        assert np.linalg.norm(found[key] - expected) <= 1e-5 * np.linalg.norm(expected), key


@pytest.fixture(scope="module")
def alone(tiny, run):
    """Runs a case on one device, once."""
    return cache(lambda **case: run(tiny(layout="contiguous", **case), {}))


HARD = {"config": WINDOWS, "rows": 16, "empty_row": 1}  # packed, padded unevenly, one device's row with no token
PLAIN = {"config": WIDE, "rows": 16, "packed": False}


def test_every_axis_at_once(tiny, run, alone):
    got = run(tiny(**HARD, remat="block", microbatches=4, rounds=2), ALL)
    check(got, alone(**HARD))
    # Only weights of a layer are gathered, and what is known of tokens, as integers; no tensor is transposed.
    program, params = got.compiled, got.params
    assert not shapes(program, "all-to-all")
    found = executed(program)
    integers = {math.prod(shape) for kind, dtype, shape in found if (kind, dtype) == ("all-gather", "s32")}
    gathered = {shape for kind, dtype, shape in found if (kind, dtype) == ("all-gather", "f32")}
    assert integers == {16 // 4 * 32 // 2}  # the rows of a data device, half the sequence
    assert gathered <= {shape for one in weights_in_use(params) for shape in (one, (1, *one))}


@pytest.mark.parametrize("sizes", BY_DEFAULT, ids=name)
def test_a_pipeline_alone_and_with_a_ring(tiny, run, alone, sizes):
    check(run(tiny(**HARD, microbatches=4), sizes), alone(**HARD))


def dropping(rate):
    return HARD | {"config": WINDOWS.model_copy(update={"attention_dropout": rate})}


def test_dropout_drops(alone):
    losses = [alone(**dropping(rate)).loss for rate in (0.0, 0.4)]
    assert losses[0] == alone(**HARD).loss
    assert losses[1] != pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [({"stage": 2, "seq": 2}, 2), pytest.param(ALL, 2, marks=pytest.mark.slow)],
    ids=["stage2 seq2", "all"],
)
def test_dropout_drops_the_same_everywhere(tiny, run, alone, sizes, rounds):
    case = dropping(0.4)
    check(run(tiny(**case, remat="block", microbatches=4, rounds=rounds), sizes), alone(**case))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*MESHES, ALL], ids=name)
def test_every_axis_and_pair_of_axes(tiny, run, alone, sizes):
    check(run(tiny(**HARD, microbatches=sizes.get("stage", 1)), sizes), alone(**HARD))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*({axis: 2} for axis in AXES), ALL], ids=name)
def test_plain_sequences(tiny, run, alone, sizes):
    check(run(tiny(**PLAIN, microbatches=sizes.get("stage", 1)), sizes), alone(**PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "microbatches"), [(1, 2), (1, 8), (2, 2), (2, 4), (4, 8)])
def test_every_schedule(tiny, run, alone, rounds, microbatches):
    config = WIDE.model_copy(update={"window": 9, "mlp_chunk": 5})
    case = HARD | {"config": config}
    got = run(tiny(**case, rounds=rounds, microbatches=microbatches, remat="attention"), {"stage": 2, "fsdp": 2})
    check(got, alone(**case))
