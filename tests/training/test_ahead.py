"""Compiling for a machine, with CPU devices in its place: what is read, what is said, what is refused."""

import json
from dataclasses import replace

import jax
import pytest

from ringjax.cli import main
from ringjax.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, TrainConfig
from ringjax.parallel import MeshError, Topology
from ringjax.planner import CHIPS, causal_keys, flops_per_token
from ringjax.training import ahead
from ringjax.training.ahead import DoesNotFitError, forecast

CONFIG = Config(
    mesh=MeshConfig(fsdp=2, seq=2),
    model=ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=48, window=(8, None)),
    data=DataConfig(seq_len=64, batch=2),
    train=TrainConfig(remat="block"),
)


def machine(count=4, memory=2**30):
    return Topology("cpu:4", replace(CHIPS["v4"], memory=memory), jax.devices()[:count])


@pytest.fixture(scope="module")
def result():
    return forecast(CONFIG, machine())


def test_what_a_program_tells(result):
    found, text = result
    assert found.devices == 4
    assert found.mesh == {"fsdp": 2, "seq": 2}
    # A CPU's transfers have no two halves. A layer has one hop forward, and backward one of the block and one of its
    # gradient; with a short window a hop is two halves of a block, one from each neighbour.
    assert (found.hops_covered, found.hops) == (0, 2 * 3 + 3)
    assert found.memory.peak >= found.memory.arguments + found.memory.temporaries > 0
    sent = {(one.kind, one.axes) for one in found.traffic}
    assert ("collective-permute", ("seq",)) in sent
    assert ("all-gather", ("fsdp", "seq")) in sent
    assert "ring_hop" in text
    lines = str(found).splitlines()
    assert any(line.startswith("ring") and "hops covered 0 of 9" in line for line in lines)
    assert any(line.startswith("memory") and "free" in line for line in lines)


def test_flops_count_windows_by_layer(result):
    keys = (8 - 8 * 7 / 128 + 32) / 2
    want = 2 * 64 * flops_per_token(CONFIG.model, 320, keys) / 4
    assert result[0].flops == pytest.approx(want)


def test_keys_of_a_window_are_those_that_tokens_see():
    for window in (1, 5, 64):
        seen = sum(min(i + 1, window) for i in range(64)) / 64
        assert causal_keys(64, window) == pytest.approx(min(seen, 32))
    assert causal_keys(64) == causal_keys(64, 100) == 32


def test_a_program_that_is_too_large_is_told_what_would_help():
    with pytest.raises(
        DoesNotFitError,
        match=r"the step needs .* on each device of cpu:4, which has 0.10 MiB: .* too much. What helps: "
        r"train.offload=true.*model.mlp_chunk=4096.*a longer ring",
    ):
        forecast(CONFIG, machine(memory=100_000))


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (20.50G) exceeds available HBM",
    ],
)
def test_a_compiler_that_runs_out_of_memory_is_understood(message):

    class Lowered:
        def compile(self, **_):
            raise jax.errors.JaxRuntimeError(message)

    with pytest.raises(DoesNotFitError, match=r"needs 20.50 GiB .* has 1.00 GiB: 19.50 GiB too much"):
        ahead._compile(Lowered(), CONFIG, machine())


def test_impossible_settings_and_other_sizes_are_refused_first():
    with pytest.raises(ConfigError, match="heads"):
        forecast(CONFIG.model_copy(update={"model": ModelConfig(heads=3)}), machine())
    with pytest.raises(MeshError, match="the machine has 2 devices, and the mesh 4"):
        forecast(CONFIG, machine(2))


def test_the_command(monkeypatch, capsys, tmp_path, small_settings):
    monkeypatch.setattr("ringjax.parallel.get_topology", lambda name: machine())
    command = ["compile", "configs/quickstart.yaml", "--topology", "v5e:2x2", "--json", *small_settings, "mesh.seq=4"]
    assert main([*command, "--save-text", str(tmp_path / "step.txt")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["mesh"] == {"seq": 4}
    assert "compiling for cpu:4 ..." in err
    assert "HloModule" in (tmp_path / "step.txt").read_text()


@pytest.mark.parametrize(
    ("topology", "words", "message"),
    [
        ("h100:8", (), "the mesh has 4 devices and h100:8 8"),
        ("h100:1000000", (), "the mesh has 4 devices and h100:1000000 1,000,000"),
        ("h100:4", ("run.platform=tpu",), "run.platform=tpu, and h100:4 is a gpu"),
        ("h100:4", ("attention.kernel=tpu",), "kernel 'tpu' runs on TPUs, and the devices here are GPUs"),
        ("v5e:2x2", ("attention.kernel=cpu",), "kernel 'cpu' runs on CPUs, and the devices here are TPUs"),
        ("h100:4", ("--save-text", ""), "--save-text needs the name of a file"),
        ("h100:4", ("--save-text", "."), "--save-text needs the name of a file"),
        ("h100:4", ("--save-text", "no/step.txt"), "cannot write --save-text no/step.txt: there is no folder no"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_a_plugin_is_needed(
    monkeypatch, capsys, small_settings, topology, words, message
):
    monkeypatch.setattr("ringjax.parallel.get_topology", lambda name: pytest.fail("too late"))
    command = ["compile", "configs/quickstart.yaml", "--topology", topology, *small_settings, "mesh.seq=4", *words]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_the_command_needs_a_machine(capsys):
    assert main(["compile", "configs/quickstart.yaml", "--topology", "v55:2x2"]) == 2
    assert "error: unknown chip 'v55' in 'v55:2x2'; did you mean" in capsys.readouterr().err
