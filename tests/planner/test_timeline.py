"""Laps of the ring and the time of a step: known cases, limits, and what advice makes of them."""

from dataclasses import fields, replace

import numpy as np
import pytest
from llama import LLAMA

from ringjax.config import Config
from ringjax.planner import CHIPS, Machine, machine_of, machine_of_topology, model_flops
from ringjax.planner.decode import decode
from ringjax.planner.estimate import Seconds, estimate
from ringjax.planner.ring import Block, break_even_tokens
from ringjax.planner.strategies import RING, Strategy
from ringjax.planner.timeline import Attention, documents_of

H100 = CHIPS["h100"]
NO_LATENCY = replace(H100, link=replace(H100.link, latency=0.0))


def run(mesh, seq_len, batch=1, layout="zigzag", model=LLAMA, **train):
    settings = {
        "mesh": mesh,
        "model": model,
        "data": {"seq_len": seq_len, "batch": batch},
        "attention": {"layout": layout},
        "train": {"precision": "bfloat16", **train},
    }
    return Config.model_validate(settings)


def attention(layout="zigzag", ring=8, tokens=8192, documents=None, window=None, kv_heads=8):
    return Attention(layout, ring, Block(tokens, 32, kv_heads, 128), documents, window, "bfloat16", fused=True)


def test_hops_hide_from_the_break_even_on():
    for backward in (False, True):
        rate = NO_LATENCY.attention("bfloat16", backward)
        tokens = break_even_tokens(rate, NO_LATENCY.link.bandwidth, 4, backward=backward)
        for share, hidden in ((0.9, False), (1.1, True)):
            # In even zigzag blocks, so that a step is half a block pair to the token.
            lap = attention(tokens=2 * round(share * tokens / 2)).laps(NO_LATENCY, NO_LATENCY.link)[backward]
            step, own = float(lap.compute[0, 1]), float(lap.compute[0, 0])
            assert (step >= lap.hop) is hidden
            # Half of the own block hides less than a step: two hops of the backward pass may stand out a little.
            assert lap.exposed <= (2 * (lap.hop - own) if backward else 1e-12) or not hidden


def test_an_exposed_lap_lasts_as_long_as_its_hops():
    slow = replace(H100.link, bandwidth=H100.link.bandwidth / 1000)
    forward, _ = attention().laps(H100, slow)
    last = forward.compute[0, -1] + forward.merge[0, -1]
    assert forward.seconds == pytest.approx(7 * forward.hop + last)
    assert forward.waited.sum(axis=1) == pytest.approx(forward.exposed, rel=1e-6)


def test_the_last_gradients_come_home_under_half_of_the_own_block():
    _, hidden = attention(tokens=65536).laps(H100, H100.link)
    assert hidden.exposed == pytest.approx(0, abs=1e-9)
    slow = replace(H100.link, bandwidth=H100.link.bandwidth / 1000)
    _, exposed = attention().laps(H100, slow)
    half = exposed.compute[0, -1]
    assert half == exposed.compute[0, 0]
    # Keys and gradients are 2 and 4 bytes an element: the first hop and the last make one whole hop together.
    assert exposed.seconds == pytest.approx(7 * exposed.hop + half, rel=1e-3)


def test_layouts_by_what_the_busiest_device_does():
    laps = {layout: attention(layout).laps(H100, H100.link)[0] for layout in ("contiguous", "zigzag", "striped")}
    free = {layout: lap.compute.sum(axis=1).mean() / lap.without_hops for layout, lap in laps.items()}
    assert laps["contiguous"].imbalance == pytest.approx(15 / 8, rel=1e-3)
    assert laps["zigzag"].imbalance == pytest.approx(1)
    assert laps["striped"].imbalance < 1.01
    assert free["contiguous"] < 0.55 < 0.9 < free["striped"] <= free["zigzag"] <= 1


def test_documents_decide_the_balance():
    """Short documents lie within blocks: contiguous is then as good as any, and a long one among them is not."""
    short = attention("contiguous", documents=(512,) * 128).laps(H100, H100.link)[0]
    assert short.imbalance == pytest.approx(1)
    mixed = attention("contiguous", documents=(32768, *(512,) * 64)).laps(H100, H100.link)[0]
    assert mixed.imbalance > 2
    assert attention("striped", documents=(32768, *(512,) * 64)).laps(H100, H100.link)[0].imbalance < 1.05
    assert documents_of([3, 4], 12) == (3, 4, 3, 2)


def test_a_large_ring_is_played_with_fewer_ranks():
    exact = attention(ring=64, tokens=4096).laps(H100, H100.link)
    folded = attention(ring=128, tokens=2048).laps(H100, H100.link)
    for one, other in zip(exact, folded, strict=True):
        assert other.compute.shape == one.compute.shape
        assert other.compute.sum() * 2 == pytest.approx(one.compute.sum(), rel=1e-3)


def test_the_parts_of_a_step_add_up_and_mfu_follows():
    config = run({"fsdp": 8, "seq": 8}, 131072, 8)
    found = estimate(config, 128256, machine_of("h100", 64))
    assert found.seconds.total == pytest.approx(sum(getattr(found.seconds, one.name) for one in fields(Seconds)))
    assert found.flops == model_flops(config, 128256)
    assert found.mfu == pytest.approx(found.flops / found.seconds.total / (64 * H100.peak))
    assert found.days(found.tokens_per_s * 86_400) == pytest.approx(1)
    assert found.seconds.limit == "attention"
    assert found.seconds.bubble == found.seconds.stages == 0
    assert found.seconds.imbalance < 1e-12


def test_what_limits_follows_the_settings():
    def limit(config, machine):
        return estimate(config, 128256, machine).seconds.limit

    assert limit(run({"fsdp": 64}, 8192, 64), machine_of("h100", 64)) == "dense"
    assert limit(run({"stage": 8, "seq": 8}, 65536, 8, microbatches=8), machine_of("h100", 64)) == "bubble"
    slow = replace(H100, network=replace(H100.link, bandwidth=1e9, latency=1e-3))
    assert limit(run({"seq": 64}, 131072), Machine("slow", slow, 64, 8)) == "exchange"
    assert limit(run({"seq": 64}, 2**20, layout="contiguous"), machine_of("h100", 64)) in ("attention", "imbalance")


def test_measured_rates_change_the_time():
    config = run({"seq": 8}, 131072)
    measured = replace(H100, attention_rate=1e12, attention_backward_rate=1e12, dense_rate=1e12)
    slow = estimate(config, 128256, Machine("slow", measured, 8, 1)).seconds
    usual = estimate(config, 128256, machine_of("h100", 8)).seconds
    assert slow.attention > 100 * usual.attention
    assert slow.dense == pytest.approx(usual.dense * H100.dense("bfloat16") / 1e12)


def test_windows_shorten_attention():
    windowed = {**LLAMA, "window": (1024, None)}
    whole, half = (
        estimate(run({"seq": 8}, 131072, model=model), 128256, machine_of("h100", 8)) for model in (LLAMA, windowed)
    )
    assert half.seconds.attention == pytest.approx(whole.seconds.attention / 2, rel=0.05)
    assert [(one.window, one.layers, one.forward.start.shape[1]) for one in half.windows] == [
        (1024, 16, 2),
        (None, 16, 8),
    ]


def test_strategies_differ_in_what_they_send():
    config, machine = run({"seq": 8}, 65536), machine_of("h100", 8)
    seconds = {
        strategy.name: estimate(config, 128256, machine, strategy=strategy).seconds
        for strategy in (RING, Strategy("all-gather"), Strategy("ulysses", 8))
    }
    assert seconds["ring"].merge > 0 == seconds["all-gather"].merge == seconds["ulysses"].merge
    assert seconds["all-gather"].exchange > seconds["ulysses"].exchange > 0
    # Everyone does the same attention in the end.
    for other in ("all-gather", "ulysses"):
        assert seconds[other].attention == pytest.approx(seconds["ring"].attention, rel=1e-3)


def test_links_of_a_machine():
    machine = machine_of("h100", 64)
    inside = {"stage": 1, "data": 1, "fsdp": 8, "seq": 8, "tensor": 1}
    across = {"stage": 1, "data": 1, "fsdp": 1, "seq": 64, "tensor": 1}
    assert machine.hop_link(inside, "seq") is H100.link
    assert machine.hop_link(inside, "fsdp") is machine.hop_link(across, "seq") is H100.network
    assert machine_of_topology("v5p:4x4x8").hosts == 1
    gather = machine.collective_seconds("all-gather", ("seq",), inside, 8e9)
    assert gather == pytest.approx(7e9 / H100.link.bandwidth, rel=0.01)
    assert machine.collective_seconds("all-reduce", ("seq",), inside, 8e9) == pytest.approx(2 * gather)
    # Eight adapters of each host share what crosses.
    assert machine.collective_seconds("all-gather", ("seq",), across, 8e9) == pytest.approx(
        8e9 * 7 / 8 / (8 * 50e9), rel=0.05
    )


def test_decoding_with_a_shared_cache():
    """It pays from S = t_comb W / (2 K D b (1 - 1 / R)) on, and no ring of messages is involved."""
    found = decode(H100, H100.link, 8, 10**6, heads=32, kv_heads=8, head_dim=128)
    combine = found.shared - found.alone / 8
    assert found.pays_from == pytest.approx(combine * H100.memory_bandwidth / (2 * 8 * 128 * 2 * (1 - 1 / 8)))
    for context, pays in ((0.9, False), (1.1, True)):
        at = decode(H100, H100.link, 8, round(context * found.pays_from), 32, 8, 128)
        assert (at.speedup > 1) is pays
    assert decode(H100, H100.link, 1, 10**6, 32, 8, 128).speedup == 1
    assert np.isinf(decode(H100, H100.link, 1, 10**6, 32, 8, 128).pays_from)
    assert decode(H100, H100.link, 8, 10**8, 32, 8, 128).speedup == pytest.approx(8, rel=0.01)
