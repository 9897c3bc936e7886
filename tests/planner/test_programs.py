"""What the planner predicts of a train step, against what XLA says of the compiled program."""

import jax
import pytest

from ringjax.config import Config, check_config
from ringjax.parallel import make_mesh
from ringjax.planner.memory import memory
from ringjax.planner.sizes import Sizes
from ringjax.planner.work import executed_flops
from ringjax.training.programs import build_programs

WIDE = {"layers": 2, "dim": 512, "heads": 4, "kv_heads": 2, "head_dim": 256, "mlp_dim": 1408, "loss_chunk": 4096}
SMALL = {"layers": 4, "dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp_dim": 704}
LARGE = {"layers": 8, "dim": 512, "heads": 16, "kv_heads": 2, "head_dim": 64, "mlp_dim": 2048}


def case(mesh, model, seq_len, batch=1, layout="zigzag", kernel="auto", optim=None, **train):
    """A run's settings, of which only shapes matter here."""
    settings = {
        "mesh": mesh,
        "model": {"vocab_size": 1024, **model},
        "data": {"seq_len": seq_len, "batch": batch},
        "attention": {"layout": layout, "kernel": kernel},
        "optim": optim or {},
        "train": train,
    }
    config = Config.model_validate(settings)
    assert not check_config(config)
    return config


def compiled(config):
    """The step that the trainer compiles; no array is made."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        programs = build_programs(config, config.model.vocab_size, mesh)
        return programs.step.lower(programs.state, programs.batch).compile()


# One tile of scores on a device, one chunk of the loss and no loop over layers: XLA counts a loop's body once.
@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        ({}, "none"),
        ({}, "block"),
        pytest.param({"fsdp": 2}, "full", marks=pytest.mark.slow),
        pytest.param({}, "attention", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, "none", marks=pytest.mark.slow),
    ],
)
def test_flops_are_those_that_xla_counts(mesh, remat):
    rows = 4 * mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    # XLA does not look into the kernel that CPUs have of their own.
    config = case(mesh, WIDE, 128, rows, layout="contiguous", kernel="xla", remat=remat, scan_layers=False)
    costs = compiled(config).cost_analysis()
    counted = (costs[0] if isinstance(costs, list) else costs)["flops"]
    assert executed_flops(config, 1024, pairs=128 * 128) == pytest.approx(counted, rel=0.02)


CASES = {
    "ring": case({"seq": 4}, SMALL, 16384),
    "rows": case({"fsdp": 4}, SMALL, 4096, 4),
    "all saved": case({"seq": 2}, SMALL, 8192, remat="none"),
    "tensor": case({"fsdp": 2, "seq": 2, "tensor": 2}, SMALL, 16384, 2),
}
SLOW_CASES = {
    "stages": case({"stage": 2, "seq": 2}, SMALL, 8192, 4),
    "q, k, v saved": case({"seq": 4}, SMALL, 16384, remat="attention"),
    "nothing saved": case({"seq": 4}, SMALL, 16384, remat="full"),
    "a larger model": case({"seq": 8}, LARGE, 65536),
    "a long block": case({"seq": 2}, SMALL, 65536),
    "replicas": case({"data": 4}, SMALL, 8192, 4),
    "parts": case({"seq": 2, "fsdp": 2}, SMALL, 8192, 8, optim={"accumulate": 4}),
    "chunks": case({"seq": 4}, {**LARGE, "mlp_chunk": 1024}, 65536),
    "a large table": case({"fsdp": 2}, {**SMALL, "vocab_size": 65536, "tied_embeddings": False}, 4096, 2),
    "contiguous": case({"seq": 4}, SMALL, 16384, layout="contiguous"),
}


@pytest.mark.parametrize(
    "config",
    [*CASES.values(), *(pytest.param(config, marks=pytest.mark.slow) for config in SLOW_CASES.values())],
    ids=[*CASES, *SLOW_CASES],
)
def test_memory_is_what_xla_plans(config):
    plan = compiled(config).memory_analysis()
    assert plan is not None
    vocab_size = config.model.vocab_size
    found = memory(config, vocab_size, "cpu")
    arguments = found.weights + found.optimizer + found.batch
    assert arguments == pytest.approx(plan.argument_size_in_bytes, abs=4096)  # a few scalars besides
    assert Sizes.of(config, vocab_size).stored_parameters * 12 == found.weights + found.optimizer
    assert 0.95 <= found.total / (plan.argument_size_in_bytes + plan.temp_size_in_bytes) <= 1.15
