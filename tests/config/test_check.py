"""Rules between settings: each is broken alone and must be the one that is reported."""

import pytest

from ringjax.config import Config, check_config
from ringjax.config.schema import MeshConfig


def build(**values) -> Config:
    """Settings from `section__name=value`."""
    tree: dict[str, dict] = {}
    for key, value in values.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def test_defaults_are_possible():
    assert check_config(Config()) == []


@pytest.mark.parametrize(
    "values",
    [
        {"mesh__tensor": 2, "mesh__seq": 8, "mesh__fsdp": 2, "data__batch": 4},
        {"mesh__tensor": 3, "model__heads": 6, "model__kv_heads": 3, "model__mlp_dim": 9, "model__vocab_size": 258},
        {"mesh__data": 2, "optim__accumulate": 3, "data__batch": 12},
        {"mesh__seq": 5, "model__dim": 320, "data__seq_len": 1000},
        {"optim__warmup_steps": 31, "train__steps": 30},  # a shortened run: a note says what that means
        {"data__source": "text", "data__path": "books", "data__pattern": "*.md"},
        {"mesh__stage": 2, "train__rounds": 2, "train__microbatches": 4, "data__batch": 8, "optim__accumulate": 2},
        {"mesh__stage": 2, "model__layers": 12, "train__rounds": 3, "model__window": (64, None)},
        {"model__layers": 5, "model__window": [64, None]},
        {"train__offload": True},
        {"train__rounds": 2},  # a run that began as a pipeline goes on without one
        {"train__offload": True, "mesh__stage": 2, "train__scan_layers": False},
        {"processes__detect": True},
        {"processes__count": 2, "processes__index": 1, "processes__coordinator": "[::1]:4567", "mesh__seq": 4},
    ],
)
def test_possible_combinations(values):
    assert check_config(build(**values)) == []


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        (
            {"model__kv_heads": 3},
            ("model.heads", "model.kv_heads"),
            "4 is not a multiple of model.kv_heads = 3 (each key/value head serves equally many); "
            "use model.heads = 3 or 6, or model.kv_heads = 2",
        ),
        (
            {"model__head_dim": 7},
            ("model.head_dim",),
            "7 is not a multiple of 2 (RoPE rotates pairs); use model.head_dim = 6 or 8",
        ),
        (
            {"model__kv_heads": 1, "mesh__tensor": 2},
            ("model.kv_heads", "mesh.tensor"),
            "1 is not a multiple of mesh.tensor = 2 (it is sharded over the tensor axis); "
            "use model.kv_heads = 2, or mesh.tensor = 1",
        ),
        (
            {"model__mlp_dim": 703, "mesh__tensor": 2},
            ("model.mlp_dim", "mesh.tensor"),
            "703 is not a multiple of mesh.tensor = 2 (it is sharded over the tensor axis); "
            "use model.mlp_dim = 702 or 704, or mesh.tensor = 1",
        ),
        (
            {"model__vocab_size": 257, "mesh__tensor": 2},
            ("model.vocab_size", "mesh.tensor"),
            "257 is not a multiple of mesh.tensor = 2 (it is sharded over the tensor axis); "
            "use model.vocab_size = 256 or 258, or mesh.tensor = 1",
        ),
        (
            {"mesh__fsdp": 3, "mesh__seq": 2, "data__batch": 3},
            ("model.dim", "mesh.fsdp", "mesh.seq"),
            "256 is not a multiple of mesh.fsdp * mesh.seq = 3 * 2 = 6 (parameters are stored sharded over both); "
            "use model.dim = 252 or 258, or mesh.fsdp * mesh.seq = 4",
        ),
        (
            {"mesh__data": 2, "mesh__fsdp": 2, "optim__accumulate": 2},
            ("data.batch", "mesh.data", "mesh.fsdp", "optim.accumulate"),
            "4 is not a multiple of mesh.data * mesh.fsdp * optim.accumulate = 2 * 2 * 2 = 8 (each part of a batch "
            "is shared out over the data and fsdp axes); "
            "use data.batch = 8, or mesh.data * mesh.fsdp * optim.accumulate = 4",
        ),
        (
            {"mesh__stage": 2, "mesh__data": 2, "mesh__fsdp": 2, "data__batch": 4},
            ("data.batch", "mesh.data", "mesh.fsdp", "optim.accumulate", "mesh.stage"),
            "4 is not a multiple of mesh.data * mesh.fsdp * optim.accumulate * mesh.stage = 2 * 2 * 1 * 2 = 8 (each "
            "microbatch of each part is shared out over the data and fsdp axes; train.microbatches is null, so there "
            "are as many as stages); use data.batch = 8, or "
            "mesh.data * mesh.fsdp * optim.accumulate * mesh.stage = 4",
        ),
        (
            {"mesh__stage": 2, "train__microbatches": 3, "data__batch": 6},
            ("train.microbatches", "mesh.stage"),
            "3 is not a multiple of mesh.stage = 2 (each stage holds as many of them); "
            "use train.microbatches = 2 or 4, or mesh.stage = 1",
        ),
        (
            {"train__offload": True, "train__remat": "none"},
            ("train.offload", "train.remat"),
            "true moves the inputs of blocks, and with train.remat = none the backward pass needs all they made; "
            "use train.remat = attention, block or full",
        ),
        (
            {"train__offload": True, "run__platform": "cpu"},
            ("train.offload", "run.platform"),
            "true moves what it can into the host's memory, and run.platform = cpu computes there already; set "
            "train.offload to false",
        ),
        (
            {"train__offload": True, "mesh__stage": 2},
            ("train.offload", "mesh.stage", "train.scan_layers"),
            "true, and with mesh.stage = 2 and train.scan_layers = true the compiler would leave most of it on the "
            "device; set train.scan_layers to false, or train.offload to false",
        ),
        (
            {"mesh__stage": 2, "train__rounds": 4},
            ("model.layers", "mesh.stage", "train.rounds"),
            "4 is not a multiple of mesh.stage * train.rounds = 2 * 4 = 8 (each stage holds as many layers in every "
            "round); use model.layers = 8, or mesh.stage * train.rounds = 4",
        ),
        (
            {"mesh__stage": 2, "model__window": (8, 8, None)},
            ("model.layers", "mesh.stage", "train.rounds", "model.window"),
            "4 is not a multiple of mesh.stage * train.rounds * the 3 windows of the pattern = 2 * 1 * 3 = 6 (each "
            "stage holds as many layers in every round, and each begins the pattern); use model.layers = 6, or fewer "
            "stages, rounds or windows",
        ),
        (
            {"train__microbatches": 4},
            ("train.microbatches", "mesh.stage"),
            "4 would change nothing, because mesh.stage = 1 is no pipeline; raise mesh.stage, or leave "
            "train.microbatches out; optim.accumulate cuts a batch into parts",
        ),
        (
            {"processes__count": 2, "processes__index": 0},
            ("processes.coordinator",),
            "null, but processes.count and processes.index are set: several processes need count, index and "
            "coordinator, each process its own index; set them all, or none",
        ),
        (
            {"processes__count": 2, "processes__index": 2, "processes__coordinator": "node0:4567"},
            ("processes.index", "processes.count"),
            "2 is not below processes.count = 2: indices start at 0",
        ),
        (
            {"processes__count": 2, "processes__index": 1, "processes__coordinator": "node0"},
            ("processes.coordinator",),
            "'node0' is not host:port, as node0:4567 or 127.0.0.1:4567; it is where process 0 runs, with a port that "
            "is free there",
        ),
        (
            {"processes__detect": True, "processes__count": 2},
            ("processes.count", "processes.detect"),
            "2 would be ignored, because processes.detect = true lets jax find the processes; leave processes.count "
            "out, or processes.detect",
        ),
        (
            {
                "processes__count": 2,
                "processes__index": 1,
                "processes__coordinator": "node0:4567",
                "run__platform": "cpu",
                "mesh__seq": 1,
            },
            ("processes.count", "mesh"),
            "2 processes cannot have equal numbers of the mesh's 1 CPU devices; use a divisor of 1",
        ),
        (
            {"train__rounds": 3},
            ("model.layers", "train.rounds"),
            "4 is not a multiple of train.rounds = 3 (each round has as many layers); use model.layers = 3 or 6, or "
            "train.rounds = 2",
        ),
        (
            {"data__seq_len": 4092, "mesh__seq": 4},
            ("data.seq_len", "mesh.seq", "attention.layout"),
            "4092 does not fit mesh.seq = 4: layout 'zigzag' on a ring of 4 needs a sequence length that is a "
            "multiple of 8, got 4092; use 4088 or 4096, or pad the sequence to it",
        ),
        (
            {"data__source": "text"},
            ("data.path", "data.source"),
            "null, but data.source = text reads files; "
            "set data.path to a file or folder of text, or data.source to stdlib",
        ),
        (
            {"data__path": "books"},
            ("data.path", "data.source"),
            "'books' would be ignored, because data.source = stdlib reads this Python's own sources; "
            "set data.source to text, or leave data.path out",
        ),
        (
            {"data__pattern": "*.md"},
            ("data.pattern", "data.source"),
            "'*.md' would be ignored, because data.source = stdlib reads this Python's own sources; "
            "set data.source to text, or leave data.pattern out",
        ),
    ],
)
def test_impossible_combinations(values, keys, message):
    (problem,) = check_config(build(**values))
    assert problem.keys == keys
    assert problem.message == message
    assert str(problem) == f"{keys[0]}: {message}"


@pytest.mark.parametrize(("layout", "fits"), [("contiguous", True), ("striped", True), ("zigzag", False)])
def test_the_length_is_judged_by_the_layout(layout, fits):
    config = build(data__seq_len=4092, mesh__seq=4, attention__layout=layout)
    assert (check_config(config) == []) is fits


@pytest.mark.parametrize("tensor", [3, 128])
def test_automatic_vocabulary_needs_a_tensor_axis_that_divides_it(tensor):
    config = build(mesh__tensor=tensor, model__heads=tensor, model__kv_heads=tensor, model__mlp_dim=tensor * 4)
    (problem,) = check_config(config)
    assert problem.keys == ("mesh.tensor", "model.vocab_size")
    assert f"set model.vocab_size to a multiple of {tensor}" in problem.message


def test_all_impossible_combinations_at_once():
    config = build(model__kv_heads=3, model__head_dim=7, data__path="x").model_copy(
        update={"mesh": MeshConfig(seq=3)}
    )
    assert [problem.keys[0] for problem in check_config(config)] == [
        "model.heads",
        "model.head_dim",
        "model.dim",
        "data.seq_len",
        "data.path",
    ]


def test_absurd_sizes_are_answered_at_once():
    config = build(model__heads=10**18 + 9, model__kv_heads=10**18)
    assert [problem.keys[0] for problem in check_config(config)] == ["model.heads", "model.kv_heads"]
    (problem,) = check_config(build(model__window=(8, 2**31)))
    assert str(problem) == "model.window: 2147483648 is too large; it must be below 2,147,483,648"
