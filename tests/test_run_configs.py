"""The configs for accelerators: legal, of the shapes they name, under headers that the command printed."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from ringjax.config import Config, load_config
from ringjax.planner import CHIPS
from ringjax.planner.memory import memory

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "run").glob("*.yaml"))
LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_dim": 14336}
LLAMA_70B = {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "mlp_dim": 28672}
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"

# What the command prints, in a comment behind the command itself.
HEADER = re.compile(
    r"^# ringjax compile (?P<path>\S+) --topology (?P<topology>(?P<chip>\w+):(?P<sides>[\dx]+))\n"
    r"#   topology +(?P<name>\S+): (?P<devices>[\d,]+) devices of (?P<available>[\d.]+) GiB, (?P<mesh>.+)\n"
    r"#   memory +(?P<peak>[\d.]+) GiB on each device, (?P<free>[\d.]+)% free: arguments .*\n"
    r"(?:#   host memory +[\d.]+ GiB for each device\n)?"
    r"#   ring +hops covered (?P<covered>[\d,]+) of (?P<hops>[\d,]+); [\d,]+ messages of tokens\n(?!#)",
    re.MULTILINE,
)


def header(path: Path) -> re.Match[str]:
    match = HEADER.search(path.read_text())
    assert match is not None, f"run benchmarks/config_headers.py {path.relative_to(ROOT)}"
    return match


def number(text: str) -> float:
    return float(text.replace(",", ""))


def shape(config: Config) -> dict[str, int]:
    return {name: getattr(config.model, name) for name in LLAMA_8B}


def test_there_is_one_for_each_promise():
    found = {(config.model.layers, config.data.seq_len, header(path)["chip"]) for path, config in loaded()}
    assert {(32, 2**17, "h100"), (32, 2**20, "h100"), (32, 2**20, "v5p")} <= found
    assert any(layers == 32 and seq_len >= 2**22 for layers, seq_len, _ in found)
    assert any(layers == 80 and seq_len == 2**20 for layers, seq_len, _ in found)
    for _, config in loaded():
        assert shape(config) in (LLAMA_8B, LLAMA_70B)
        assert config.model.vocab_size == 128256
        assert config.train.precision == "bfloat16"


def loaded() -> list[tuple[Path, Config]]:
    return [(path, load_config(path)) for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_headers_agree_with_their_configs(path):
    config, told = load_config(path), header(path)
    name = f"configs/run/{path.name}"
    assert told["path"] == name
    program, command, launched, *overrides = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    assert (program, command, launched) == ("ringjax", "train", name)
    launch = load_config(path, overrides)
    assert launch.run.platform == CHIPS[told["chip"]].platform
    assert launch.run.dir == f"runs/{path.stem}"

    sides = list(map(int, told["sides"].split("x")))
    mesh = {axis: size for axis, size in config.mesh.model_dump().items() if type(size) is int and size > 1}
    assert told["name"] == told["topology"]
    assert number(told["devices"]) == prod(mesh.values()) == prod(sides) * CHIPS[told["chip"]].devices
    assert told["mesh"] == " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    # More hosts than one find each other; a host alone has nobody to wait for.
    assert launch.processes.detect == (len(sides) > 1)

    available = CHIPS[told["chip"]].memory / 2**30
    assert number(told["available"]) == pytest.approx(available, abs=0.005)
    assert number(told["free"]) >= 5
    assert number(told["free"]) == pytest.approx(100 * (1 - number(told["peak"]) / available), abs=0.1)
    # Forward, then keys with values and their gradients backward; and forward once more if its result is not kept,
    # where the first hop is that of the backward lap too.
    hops, layers = config.mesh.seq - 1, config.model.layers
    assert number(told["hops"]) == layers * (4 * hops - 1 if config.train.remat == "full" else 3 * hops)
    assert told["covered"] == told["hops"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_planner_says_what_their_headers_say(path):
    told, config = header(path), load_config(path)
    assert config.model.vocab_size is not None
    predicted = memory(config, config.model.vocab_size, CHIPS[told["chip"]].platform)
    assert 0.95 <= predicted.total / 2**30 / number(told["peak"]) <= 1.15


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra cuda13-compiler")
def test_a_header_is_what_the_command_prints():
    path = ROOT / "configs" / "run" / "8b_128k_h100x8.yaml"
    written = header(path)
    command = ["compile", str(path), "--topology", written["topology"]]
    # In a process of its own: flags of these tests' CPU devices mean nothing to other compilers.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    printed = {line.split()[0]: line for line in done.stdout.splitlines()}
    for line in written[0].splitlines():
        word = line.removeprefix("#").split()[0]
        if word in ("topology", "ring"):
            assert line == f"#   {printed[word]}"
    # Versions of the compiler differ by a little.
    peak = re.search(r"([\d.]+) GiB on each device", printed["memory"])
    assert peak is not None
    assert float(peak[1]) == pytest.approx(number(written["peak"]), rel=0.03), "run benchmarks/config_headers.py"
