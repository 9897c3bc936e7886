"""Which mesh and strategy, and `ringjax plan` as a command."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from math import prod

import pytest
from llama import LLAMA

from ringjax.cli import main
from ringjax.config import Config, ConfigError, MeshConfig, check_config
from ringjax.planner import CHIPS, Machine, machine_of, short_form
from ringjax.planner.advice import advise
from ringjax.planner.estimate import estimate
from ringjax.planner.memory import fits, memory

QUICKSTART = "configs/quickstart.yaml"


def run(seq_len, batch, mesh=None, **model):
    settings = {
        "mesh": mesh or {},
        "model": {**LLAMA, **model},
        "data": {"seq_len": seq_len, "batch": batch},
        "train": {"precision": "bfloat16"},
    }
    return Config.model_validate(settings)


@pytest.fixture(scope="module")
def advice():
    return advise(run(2**20, 1), 128256, machine_of("h100", 64))


def test_all_candidates_are_possible_and_in_order(advice):
    assert 0 < len(advice.ranked) <= advice.considered
    steps = [one.seconds for one in advice.ranked]
    assert steps == sorted(steps)
    for one in advice.ranked:
        assert prod(one.mesh.values()) == 64
        config = advice.config.model_copy(update={"mesh": MeshConfig.model_validate(one.mesh)})
        assert not check_config(config)
        assert fits(one.memory, advice.machine)
        assert estimate(config, 128256, advice.machine, strategy=one.strategy).seconds.total == one.seconds


def test_long_context_wants_a_ring_and_says_why_others_lose(advice):
    assert advice.verdict().startswith("use the ring: ")
    text = str(advice)
    assert "transfers of attention that nothing hides" in text
    assert "[not in this version]" in text
    assert advice.runnable is not None
    assert advice.runnable.strategy.runs
    assert str(advice.runnable) in text
    tokens, mesh = advice.longest
    longest = run(tokens, 1, mesh)
    assert fits(memory(longest, 128256, "gpu"), advice.machine)
    assert not fits(memory(run(2 * tokens, 1, mesh), 128256, "gpu"), advice.machine)
    assert tokens > 2**20


def test_short_context_on_a_slow_link_wants_none():
    """Where rows are enough for all devices, and where they are not but a gather is cheaper than hops of latency."""
    slow = replace(CHIPS["h100"], link=replace(CHIPS["h100"].link, bandwidth=2e9, latency=1e-3))
    found = advise(run(8192, 8), 128256, Machine("slow", slow, 8, 1))
    assert found.verdict().startswith("do not use the ring here: ")
    assert found.best.mesh["seq"] == 1
    assert found.break_even["NVLink4"][0] > 8192


def test_memory_rules_out_what_does_not_fit():
    found = advise(run(131072, 8, layers=64, dim=8192, heads=64, mlp_dim=28672), 128256, machine_of("h100", 64))
    assert len(found.ranked) < found.considered
    assert all(fits(one.memory, found.machine) for one in found.ranked)


def test_the_ring_counts_documents():
    documents = (4096,) * 256
    packed = advise(run(2**20, 1), 128256, machine_of("h100", 64), documents)
    whole = advise(run(2**20, 1), 128256, machine_of("h100", 64))
    assert packed.best.seconds < whole.best.seconds / 5


def test_nothing_fits_and_the_smallest_number_that_would():
    with pytest.raises(ConfigError, match=r"nothing fits on 2 x v5e.* Doubling the devices, 128 are the smallest"):
        advise(run(65536, 16), 128256, machine_of("v5e", 2))
    with pytest.raises(ConfigError, match=r"no mesh of 7 devices goes with this model"):
        advise(run(65536, 1), 128256, machine_of("v5e", 7))
    with pytest.raises(ConfigError, match=r"Not even 1,048,576 devices are enough"):
        advise(run(2**20, 1, dim=2**20, heads=1, kv_heads=1, head_dim=2**16), 128256, machine_of("h100", 2**19))


def test_thousands_of_chips_take_seconds():
    """CPU seconds of this process: what else the machine does is not counted."""
    started = time.process_time()
    found = advise(run(2**20, 64), 128256, machine_of("v5p", 4096))
    assert time.process_time() - started < 10
    assert found.considered > 500


def test_a_batch_in_parts_is_advised_on_too():
    config = run(65536, 8)
    parts = config.model_copy(update={"optim": config.optim.model_copy(update={"accumulate": 2})})
    found, whole = (advise(one, 128256, machine_of("h100", 8)) for one in (parts, config))
    assert found.break_even == whole.break_even
    assert found.decode == whole.decode


def test_the_longest_context_is_one_that_settings_take():
    vast = replace(CHIPS["v5p"], memory=2**60)
    tokens, mesh = advise(run(2**20, 1), 128256, Machine("vast", vast, 8, 1)).longest
    assert 2**31 - 2**12 < tokens < 2**31
    assert not check_config(run(tokens, 1, mesh))


def plan(capsys, *words, status=0):
    assert main(["plan", QUICKSTART, *words]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_the_command_prints_a_table_and_json(capsys):
    text = plan(capsys, "--hardware", "h100", "--tokens", "1e9", "--documents", "100,900", "train.precision=bfloat16")
    starts = [line.split()[0] for line in text.splitlines()]
    for name in (
        "machine",
        "parameters",
        "memory",
        "saved",
        "lap",
        "layouts",
        "break-even",
        "sent",
        "step",
        "MFU",
        "training",
    ):
        assert name in starts
    assert "causal counted as half" in text
    found = json.loads(plan(capsys, "--hardware", "h100", "--json", "--tokens", "1e9"))
    assert found["mesh"] == {"seq": 4}
    assert found["parameters"] == 385_664
    assert found["memory"]["total"] == sum(
        size for name, size in found["memory"].items() if name not in ("total", "available", "host")
    )
    assert found["days"] > 0
    assert found["layouts"]["contiguous"]["imbalance"] == pytest.approx(7 / 4, rel=1e-2)
    assert found["layouts"]["zigzag"]["imbalance"] == pytest.approx(1)
    assert found["mfu_convention"].startswith("model FLOPs over peak")


def test_the_command_advises(capsys):
    words = ("--topology", "v5p:2x2x2", "--advise", "data.batch=8")
    assert "meshes and strategies fit on v5p:2x2x2. The best:" in plan(capsys, *words)
    found = json.loads(plan(capsys, *words, "--json"))
    assert found["best"][0]["loses_by"] is None
    assert all(one["loses_by"] for one in found["best"][1:])
    assert found["longest_context"]["tokens"] > 4096


def test_hardware_of_ones_own(capsys, tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("ours: {like: h100, attention_tflops: 1, attention_backward_tflops: 1}")
    words = ("--json", "--hardware-file", str(path), "--hardware")
    slow = json.loads(plan(capsys, *words, "ours"))["seconds"]["attention"]
    usual = json.loads(plan(capsys, "--json", "--hardware", "h100"))["seconds"]["attention"]
    assert slow > 10 * usual
    assert "would be ignored: it has ours" in plan(capsys, *words, "h100", status=2)


def test_rates_measured_in_bfloat16_say_what_share_of_the_peak_float32_reaches():
    measured = replace(CHIPS["h100"], attention_rate=CHIPS["h100"].peak / 2)
    assert measured.attention("float32", backward=False) == measured.peak_float32 / 2
    with pytest.raises(ValueError, match="precision must be bfloat16 or float32, got 'fp8'"):
        measured.dense("fp8")


def test_settings_of_the_mesh_are_not_looked_at_for_advice(capsys):
    words = ("--hardware", "h100", "--devices", "8", "--advise", "model.layers=4", "data.batch=4")
    stages = ("mesh.stage=2", "train.microbatches=4", "train.rounds=2")
    assert "meshes and strategies fit on 8 x h100" in plan(capsys, *words, *stages)


def test_decoding_reads_what_the_layers_see(capsys):
    words = ("--hardware", "h100", "--json")
    found = [json.loads(plan(capsys, *words, word))["decode"] for word in ("model.window=null", "model.window=1000")]
    assert [one["context"] for one in found] == [4096, 1000]
    bfloat16 = json.loads(plan(capsys, *words, "train.precision=bfloat16"))["decode"]
    assert found[0]["alone"] == 2 * bfloat16["alone"]


def test_a_reader_may_stop_reading():
    command = [sys.executable, "-m", "ringjax", "plan", QUICKSTART, "--hardware", "h100"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say which machine"),
        (("--hardware", "h100", "--topology", "h100:4"), "one of the two"),
        (("--hardware", "h10"), "unknown hardware 'h10'; did you mean h100"),
        (("--hardware", "h100", "--devices", "0"), "devices must be a whole number from 1 to"),
        (("--hardware", "h100", "--devices", "12"), "no whole hosts of 8; use 8 or 16"),
        (("--hardware", "h100", "--devices", "8"), "the mesh has 4 devices (seq 4) and the machine 8"),
        (("--topology", "h100:4", "--devices", "4"), "--devices 4 would be ignored"),
        (("--hardware", "h100", "--network", "300g"), "--network must be one of 100g, 200g, 400g"),
        (("--hardware", "v5p", "--network", "100g"), "--network 100g would be ignored"),
        (("--hardware", "h100", "--documents", "5,0"), "--documents must be lengths of at least 1 token"),
        (("--hardware", "h100", "--documents", "x"), "--documents must be lengths"),
        (("--hardware", "h100", "--tokens", "-1"), "--tokens must be a number above 0"),
        (("--hardware", "h100", "--tokens", "nan"), "--tokens must be a number above 0"),
        (("--hardware", "h100", "--advise", "--plot", "x.png"), "leave one out"),
        (("--hardware", "h100", "--advise", "--tokens", "1e9"), "--tokens would be ignored"),
        (("--hardware", "h100", "--network", "100g"), "--network 100g would be ignored: 4 x h100 is one host"),
        (("--hardware", "h100", "attention.kernel=tpu"), "attention.kernel: kernel 'tpu' runs on TPUs"),
        (("--hardware", "h100", "run.platform=tpu"), "run.platform=tpu, and 4 x h100 is a gpu: leave it out"),
        (("--hardware", "v5e", "--devices", "512"), "from 1 to 256, of which a pod of v5e has so many; got 512"),
        (("--hardware", "h100", "--hardware-file", "none.yaml"), "'none.yaml' cannot be read: No such file"),
        (("--hardware", "h100", "--documents", "1_0"), "--documents must be lengths of at least 1 token"),
        (("--hardware", "h100", "--documents", "5000"), "no document is longer than a row"),
        (("--hardware", "h100", "--plot", ""), "--plot needs the name of a file"),
        (("--hardware", "h100", "--plot", "plan.txt"), "the name must end in .png, .svg, .pdf"),
        (("--hardware", "h100", "--plot", "plan"), "the name must end in"),
        (("--hardware", "h100", "--plot", "none/x.png"), "cannot write --plot none/x.png: there is no folder none"),
    ],
)
def test_wrong_options_are_told_what_to_change(capsys, words, message):
    assert message in plan(capsys, *words, status=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "h100", "--hardware", "a100"), "argument --hardware: is there twice; leave one out"),
        (("--hardware", "h100", "--devices", "4_0"), "argument --devices: must be a whole number, got '4_0'"),
    ],
)
def test_options_that_are_not_read(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", QUICKSTART, *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_shown_and_fails(capsys):
    words = ("--hardware", "h100", "model.layers=64", "model.dim=8192", "model.heads=64", "model.mlp_dim=32768")
    assert main(["plan", QUICKSTART, *words]) == 1
    assert "DOES NOT FIT into 79.11 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p:4x4", "a v5p slice has 3 sides"),
        ("v5p:3x4x4", "its first two sides must be even"),
        ("v6e:32x16", "a v6e slice has at most 256 chips, those of a pod; 'v6e:32x16' has 512"),
        ("h100:12", "no whole hosts of 8"),
        ("h100:\u0664", "unknown topology"),
        ("h100:0", "no size of a topology may be 0"),
    ],
)
def test_wrong_topologies(capsys, topology, message):
    assert message in plan(capsys, "--topology", topology, status=2)


def test_pictures(capsys, tmp_path, monkeypatch):
    path = tmp_path / "plan.svg"
    plan(capsys, "--hardware", "h100", "--plot", str(path))
    assert path.read_text().startswith("<?xml")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'ringjax[plot]'" in plan(capsys, "--hardware", "h100", "--plot", str(path), status=1)


class Device:
    platform = "gpu"

    def __init__(self, kind):
        self.device_kind = kind


def test_the_short_form_knows_the_chip_or_leaves_time_out():
    config = run(65536, 1, {"seq": 8})
    known = short_form(config, 128256, Device("NVIDIA H100 80GB HBM3"))
    assert "GiB on each device" in known
    assert "tokens/s, MFU" in known
    unknown = short_form(config, 128256, Device("NVIDIA RTX 3090"))
    assert unknown == known.split(";")[0]
    # Twelve GPUs are no hosts of eight.
    assert ";" not in short_form(run(98304, 1, {"seq": 12}, dim=3072), 128256, Device("NVIDIA H100 80GB HBM3"))
