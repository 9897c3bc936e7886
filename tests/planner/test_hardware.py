"""The table of accelerators, and those that a user adds."""

import pytest

from ringjax.config import ConfigError
from ringjax.planner import CHIPS, NETWORKS, find_chip, load_chips

NUMBERS = ("memory", "peak", "peak_float32", "memory_bandwidth", "link")


def written(folder, text):
    path = folder / "hardware.yaml"
    path.write_text(text)
    return str(path)


def test_every_number_has_a_source():
    for chip in CHIPS.values():
        assert all(chip.sources[name] for name in NUMBERS), chip.name
        assert chip.link.source
        assert (chip.network is None) == (chip.platform == "tpu")
        assert chip.network is None or (chip.sources["network"] and chip.network.source)
    assert {"a100", "h100", "h200", "b200", "v4", "v5e", "v5p", "v6e", "tpu7x"} == set(CHIPS)
    assert [link.bandwidth for link in NETWORKS.values()] == [12.5e9, 25e9, 50e9]


def test_two_ways_double_a_torus_and_not_a_switch():
    for chip in CHIPS.values():
        ratio = chip.link.ring_bandwidth(2) / chip.link.ring_bandwidth(1)
        assert ratio == (2 if chip.platform == "tpu" else 1)


def test_measured_rates_take_the_place_of_shares_of_the_peak(tmp_path):
    text = """
ours:
  like: h100
  network_gb_per_s: 45
  attention_tflops: 610
  source: measured in March
"""
    chips = load_chips(written(tmp_path, text))
    ours, h100 = chips["ours"], CHIPS["h100"]
    assert ours.attention("bfloat16", backward=False) == 610e12
    assert ours.attention("bfloat16", backward=True) == h100.attention("bfloat16", backward=True)
    assert ours.network is not None
    assert ours.network.bandwidth == 45e9
    assert ours.memory == h100.memory
    assert ours.sources["attention_tflops"] == "measured in March"
    assert find_chip("OURS", chips) is ours


def test_a_chip_of_ones_own(tmp_path):
    text = """
box: {platform: cpu, memory_gib: 16, peak_tflops: 0.2, memory_gb_per_s: 20, link_gb_per_s: 5, link_latency_us: 50}
"""
    chip = load_chips(written(tmp_path, text))["box"]
    assert (chip.memory, chip.link.bandwidth, chip.host) == (16 * 2**30, 5e9, None)
    assert chip.link.latency == pytest.approx(50e-6)
    assert chip.dense("float32") < chip.peak == 0.2e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ours: {like: h100, atention_tflops: 3}", "unknown key atention_tflops; did you mean attention_tflops?"),
        ("ours: {like: h10}", "like: unknown hardware 'h10'; did you mean h100?"),
        ("ours: {like: h100, peak_tflops: -1}", "peak_tflops must be a number from 1e-06 to 1e+09, got -1"),
        ("ours: {like: h100, peak_tflops: .inf}", "peak_tflops must be a number from 1e-06 to 1e+09, got inf"),
        ("ours: {like: h100, peak_tflops: fast}", "peak_tflops must be a number from 1e-06 to 1e+09, got 'fast'"),
        ("ours: {like: h100, devices_per_host: 2.5}", "devices_per_host must be an integer, got 2.5"),
        ("ours: {platform: npu, memory_gib: 3}", "platform must be tpu, gpu or cpu, got 'npu'"),
        ("ours: {platform: gpu, memory_gib: 3}", "needs peak_tflops, memory_gb_per_s, link_gb_per_s, or like"),
        ("ours: {like: h100, attention_tflops: 610000}", "attention_tflops is what is reached of the peak, 989"),
        (
            "ours: {like: h100, peak_tflops: 100, dense_tflops: 200}",
            "dense_tflops is what is reached of the peak, 100",
        ),
        ("ours: {like: h100, memory_gib: 1e308}", "memory_gib must be a number from"),
        ("ours: {like: h100, link_gb_per_s: 1e-300}", "link_gb_per_s must be a number from"),
        ("ours: {like: [h100]}", "like: unknown hardware ['h100']"),
        ("ours: {like: ours}", "like: unknown hardware 'ours'; there are"),
        ("ours: {like: h100, platform: tpu}", "platform is that of h100, gpu: leave it out, got tpu"),
        ("ours: {like: v5p, network_gb_per_s: 5}", "a network would be ignored without devices_per_host"),
        ("ours: {like: h100, source: {a: b}}", "source must be a text"),
        ("'': {like: h100}", "a chip's name must be of letters"),
        ("ours: {like: h100, memory_gib: 70, memory_gib: 80}", "memory_gib is there twice"),
        ("ours: {like: h100}\nours: {like: a100}", "ours is there twice"),
        ("ours: {[h100]: 3}", "cannot be read as a value"),
        ("- h100", "needs names of chips"),
        ("ours: &a {like: h100}", "anchors"),
        ("", "needs names of chips"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        load_chips(written(tmp_path, text))
    assert message in str(error.value)
    assert "hardware.yaml" in str(error.value)


def test_a_missing_file_and_a_wrong_name(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_chips(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="unknown hardware 'h10'; did you mean h100"):
        find_chip("h10")
