"""The rules that tie several settings together.

Each rule looks at a whole `Config` and yields what is wrong with it, naming the settings, their values and a change
that helps. What a single setting may hold is the schema's business.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ringjax.attention.layout import get_layout
from ringjax.config.schema import Config, DataConfig

# With model.vocab_size null, the embedding has the tokenizer's size rounded up to a multiple of this.
VOCAB_MULTIPLE = 64
LARGEST = 2**31  # what fits into the integers of a program


@dataclass(frozen=True)
class Problem:
    """An impossible combination.

    Attributes:
      keys: the settings involved, the most relevant first.
      message: what is required, what is given and what to change.
    """

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.message}"


def check_config(config: Config) -> list[Problem]:
    """Find every impossible combination of settings. No device is touched.

    `load_config` calls it; call it yourself for a Config built in Python.

    Args:
      config: settings that are valid one by one.

    Returns:
      The problems, empty if the run is possible. `str(problem)` is a line to show.

    Example:
      >>> from ringjax.config import Config, ModelConfig, check_config
      >>> problems = check_config(Config(model=ModelConfig(heads=4, kv_heads=3)))
      >>> problems[0].keys
      ('model.heads', 'model.kv_heads')
    """
    if too_large := list(_sizes(config)):
        return too_large
    rules = (_processes, _model, _pipeline, _offload, _tensor, _embed, _batch, _sequence, _source)
    return [problem for rule in rules for problem in rule(config)]


def _sizes(config: Config) -> Iterator[Problem]:
    """No run has this many of anything, and the other rules would compute with it."""
    for section, values in config.model_dump().items():
        for name, value in values.items():
            numbers = value if isinstance(value, tuple | list) else (value,)
            for number in numbers:
                if isinstance(number, int) and abs(number) >= LARGEST and name != "seed":
                    yield Problem((f"{section}.{name}",), f"{number} is too large; it must be below {LARGEST:,}")


def _processes(config: Config) -> Iterator[Problem]:
    processes = config.processes
    named = {name: getattr(processes, name) for name in ("count", "index", "coordinator")}
    given = [f"processes.{name}" for name, value in named.items() if value is not None]
    if processes.detect:
        if given:
            yield Problem(
                (given[0], "processes.detect"),
                f"{named[given[0].split('.')[1]]} would be ignored, because processes.detect = true lets jax find "
                f"the processes; leave {', '.join(given)} out, or processes.detect",
            )
        return
    if not given:
        return
    if missing := [f"processes.{name}" for name, value in named.items() if value is None]:
        yield Problem(
            tuple(missing),
            f"null, but {' and '.join(given)} {'is' if len(given) == 1 else 'are'} set: several processes need "
            "count, index and coordinator, each process its own index; set them all, or none",
        )
        return
    assert processes.count is not None
    assert processes.index is not None
    if processes.index >= processes.count:
        yield Problem(
            ("processes.index", "processes.count"),
            f"{processes.index} is not below processes.count = {processes.count}: indices start at 0",
        )
    host, _, port = (processes.coordinator or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        yield Problem(
            ("processes.coordinator",),
            f"{processes.coordinator!r} is not host:port, as node0:4567 or 127.0.0.1:4567; it is where process 0 "
            "runs, with a port that is free there",
        )
    if config.run.platform == "cpu":
        size = prod(getattr(config.mesh, axis) for axis in ("stage", "data", "fsdp", "seq", "tensor"))
        if size % processes.count:
            yield Problem(
                ("processes.count", "mesh"),
                f"{processes.count} processes cannot have equal numbers of the mesh's {size} CPU devices; use a "
                f"divisor of {size}",
            )


def _model(config: Config) -> Iterator[Problem]:
    yield from _multiple(config, "model.heads", ("model.kv_heads",), "each key/value head serves equally many")
    yield from _multiple(config, "model.head_dim", (), "RoPE rotates pairs", factor=2)


def _pipeline(config: Config) -> Iterator[Problem]:
    stages, train = config.mesh.stage, config.train
    if stages == 1:
        if train.microbatches is not None:
            yield Problem(
                ("train.microbatches", "mesh.stage"),
                f"{train.microbatches} would change nothing, because mesh.stage = 1 is no pipeline; raise "
                "mesh.stage, or leave train.microbatches out; optim.accumulate cuts a batch into parts",
            )
        # Rounds are how a run's weights are stacked: it keeps them when it goes on without a pipeline.
        yield from _multiple(config, "model.layers", ("train.rounds",), "each round has as many layers")
        return
    reason = "each stage holds as many layers in every round"
    layers, length = config.model.layers, len(config.model.windows)
    if length > 1:
        divisor = stages * train.rounds * length
        if layers % divisor:
            yield Problem(
                ("model.layers", "mesh.stage", "train.rounds", "model.window"),
                f"{layers} is not a multiple of mesh.stage * train.rounds * the {length} windows of the pattern = "
                f"{stages} * {train.rounds} * {length} = {divisor} ({reason}, and each begins the pattern); use "
                f"model.layers = {-(-layers // divisor) * divisor}, or fewer stages, rounds or windows",
            )
    else:
        yield from _multiple(config, "model.layers", ("mesh.stage", "train.rounds"), reason)
    if train.microbatches is not None:
        yield from _multiple(config, "train.microbatches", ("mesh.stage",), "each stage holds as many of them")


def _offload(config: Config) -> Iterator[Problem]:
    if config.train.offload and config.train.remat == "none":
        yield Problem(
            ("train.offload", "train.remat"),
            "true moves the inputs of blocks, and with train.remat = none the backward pass needs all they made; "
            "use train.remat = attention, block or full",
        )
    if config.train.offload and config.mesh.stage > 1 and config.train.scan_layers:
        # XLA moves what one loop keeps; of a loop of layers inside the loop of ticks it moves one tick's share.
        yield Problem(
            ("train.offload", "mesh.stage", "train.scan_layers"),
            f"true, and with mesh.stage = {config.mesh.stage} and train.scan_layers = true the compiler would leave "
            "most of it on the device; set train.scan_layers to false, or train.offload to false",
        )
    if config.train.offload and config.run.platform == "cpu":
        yield Problem(
            ("train.offload", "run.platform"),
            "true moves what it can into the host's memory, and run.platform = cpu computes there already; set "
            "train.offload to false",
        )


def _tensor(config: Config) -> Iterator[Problem]:
    for key in ("model.heads", "model.kv_heads", "model.mlp_dim"):
        yield from _multiple(config, key, ("mesh.tensor",), "it is sharded over the tensor axis")
    if config.model.vocab_size is not None:
        yield from _multiple(config, "model.vocab_size", ("mesh.tensor",), "it is sharded over the tensor axis")
    elif VOCAB_MULTIPLE % config.mesh.tensor:
        yield Problem(
            ("mesh.tensor", "model.vocab_size"),
            f"{config.mesh.tensor} does not divide {VOCAB_MULTIPLE}, and with model.vocab_size = null the "
            f"vocabulary, sharded over the tensor axis, is a multiple of {VOCAB_MULTIPLE}; set model.vocab_size "
            f"to a multiple of {config.mesh.tensor} that holds the tokenizer's vocabulary",
        )


def _embed(config: Config) -> Iterator[Problem]:
    yield from _multiple(config, "model.dim", ("mesh.fsdp", "mesh.seq"), "parameters are stored sharded over both")


def _batch(config: Config) -> Iterator[Problem]:
    divisors = ("mesh.data", "mesh.fsdp", "optim.accumulate")
    if config.mesh.stage == 1:
        yield from _multiple(
            config, "data.batch", divisors, "each part of a batch is shared out over the data and fsdp axes"
        )
        return
    microbatches = "mesh.stage" if config.train.microbatches is None else "train.microbatches"
    reason = "each microbatch of each part is shared out over the data and fsdp axes"
    if microbatches == "mesh.stage":
        reason += "; train.microbatches is null, so there are as many as stages"
    yield from _multiple(config, "data.batch", (*divisors, microbatches), reason)


def _sequence(config: Config) -> Iterator[Problem]:
    try:
        get_layout(config.attention.layout).check(config.data.seq_len, config.mesh.seq)
    except ValueError as error:
        given = f"{config.data.seq_len} does not fit mesh.seq = {config.mesh.seq}"
        yield Problem(("data.seq_len", "mesh.seq", "attention.layout"), f"{given}: {error}")


def _source(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.source == "text" and not data.path:
        yield Problem(
            ("data.path", "data.source"),
            f"{'null' if data.path is None else 'empty'}, but data.source = text reads files; "
            "set data.path to a file or folder of text, or data.source to stdlib",
        )
    if data.source == "stdlib":
        for name, unused in (("path", None), ("pattern", DataConfig.model_fields["pattern"].default)):
            value = getattr(data, name)
            if value != unused:
                yield Problem(
                    (f"data.{name}", "data.source"),
                    f"{value!r} would be ignored, because data.source = stdlib reads this Python's own sources; "
                    f"set data.source to text, or leave data.{name} out",
                )


def _multiple(config: Config, key: str, divisors: tuple[str, ...], reason: str, factor: int = 1) -> Iterator[Problem]:
    """The setting `key` must be a multiple of the product of the settings `divisors` and of `factor`."""
    value = _value(config, key)
    sizes = [_value(config, divisor) for divisor in divisors]
    divisor = prod(sizes) * factor
    if value % divisor == 0:
        return
    multiples = [n for n in (value // divisor * divisor, (value // divisor + 1) * divisor) if n]
    change = f"use {key} = {' or '.join(str(n) for n in multiples)}"
    required = str(divisor)
    if divisors:
        name = " * ".join(divisors)
        required = f"{name} = {' * '.join(str(size) for size in sizes)}"
        if len(sizes) > 1:
            required += f" = {divisor}"
        # The search is bounded, so that absurd sizes get their message at once.
        smaller = next(n for n in range(min(divisor, value, 4096), 0, -1) if value % n == 0)
        change += f", or {name} = {smaller}"
    yield Problem((key, *divisors), f"{value} is not a multiple of {required} ({reason}); {change}")


def _value(config: Config, key: str) -> Any:
    """The value of a setting by its dotted path."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
