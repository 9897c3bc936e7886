"""Programs for NVIDIA GPUs, compiled without one: every kernel, alone and in the ring, and the memory it takes.

They need jax's CUDA plugin (`pip install jax-cuda13-plugin jax-cuda13-pjrt` of jax's version), which brings the
compiler, and neither a driver nor a GPU.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.attention import Mask, alibi_slopes, ring_attention
from ringjax.attention.kernels import GpuKernel, Gradients, Lead, Order, Relation, all_slots
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial
from ringjax.parallel import get_topology

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
pytestmark = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, PLUGINS)),
    reason=f"programs for NVIDIA GPUs are compiled by jax's CUDA plugin: none of {', '.join(PLUGINS)} is installed",
)

BATCH, HEADS, KV_HEADS, LENGTH = 1, 32, 8, 8192


def devices(gpu):
    """Eight GPUs of one host, as the compiler sees them."""
    return get_topology(f"{gpu}:8").devices


PLAIN, EVERYTHING = ScoreRule(0.1), ScoreRule(0.1, softcap=20.0, dropout=0.1, alibi=True)


@pytest.mark.parametrize(
    ("gpu", "dtype", "dim", "order", "rule"),
    [
        ("a100", "bfloat16", 128, Order.SLOTS, PLAIN),
        ("a100", "float16", 256, Order.ANY, EVERYTHING),
        ("a100", "float32", 256, Order.SLOTS, PLAIN),
        ("h100", "bfloat16", 80, Order.ANY, EVERYTHING),
        ("h100", "float32", 128, Order.ALL, PLAIN),
        ("b200", "bfloat16", 128, Order.ANY, EVERYTHING),
        ("b200", "float32", 64, Order.SLOTS, PLAIN),
    ],
)
def test_kernels_compile(gpu, dtype, dim, order, rule):
    """They would not if they needed more shared memory than there is. 1000 queries and keys fill no tiles."""
    kernel, length = GpuKernel(), 1000
    sharding = NamedSharding(Mesh(np.array(devices(gpu)[:1]), ("device",)), PartitionSpec())

    def like(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    rows = (BATCH, KV_HEADS, HEADS // KV_HEADS, length)
    q, dout, out, lse = (
        like(*rows, dim),
        like(*rows, dim),
        like(*rows, dim, dtype="float32"),
        like(*rows, dtype="float32"),
    )
    kv, heads, tokens = (
        like(BATCH, KV_HEADS, length, 2 * dim),
        like(*rows[:3], dtype="float32"),
        like(1, length, dtype="int32"),
    )

    def run(q, kv, out, lse, dout, tokens, slopes):
        positions = tokens if order is Order.ANY else None
        relation = Relation(Mask(window=300), order, Lead(), *[Tokens(positions, positions)] * 2)
        of_heads = Heads(slopes, slopes.astype(jnp.uint32)) if rule.alibi else Heads()
        slots = all_slots(length), all_slots(length)
        part = kernel.forward(q, kv, relation, rule, of_heads, Partial(out, lse), *slots)
        sums = Gradients(*(x.astype(jnp.float32) for x in (q, kv)))
        return part, kernel.backward(q, kv, relation, rule, of_heads, lse, lse, dout, sums, *slots)

    text = jax.jit(run).lower(q, kv, out, lse, dout, tokens, heads).compile().as_text() or ""
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3


def ring_program(gpu, ring, what, dim=128, dtype="bfloat16", placed=False, packed=False, **options):
    """The forward lap, or the backward lap with the forward's residuals as input, at LENGTH tokens a device."""
    mesh = Mesh(np.array(devices(gpu)[:ring]), ("seq",), axis_types=(AxisType.Auto,))
    seq = ring * LENGTH

    def like(*shape, dtype):
        spec = PartitionSpec(None, "seq") if shape[1:2] == (seq,) else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def forward(q, k, v, tokens):
        given: dict[str, Any] = {"positions": tokens if placed else None, "segment_ids": tokens if packed else None}
        given["kernel"] = GpuKernel()
        return ring_attention(q, k, v, mesh=mesh, **given | options)

    def pulled(*inputs):
        return jax.vjp(lambda q, k, v: forward(q, k, v, inputs[3]), *inputs[:3])[1]

    q, k = (like(BATCH, seq, heads, dim, dtype=jnp.dtype(dtype)) for heads in (HEADS, KV_HEADS))
    inputs = q, k, k, like(BATCH, seq, dtype=jnp.int32)
    if what == "forward":
        return jax.jit(forward).lower(*inputs).compile()
    residuals = jax.tree.map(lambda x: like(*x.shape, dtype=x.dtype), jax.eval_shape(pulled, *inputs))
    return jax.jit(lambda pullback, dout: pullback(dout)).lower(residuals, q).compile()


def megabytes(program):
    plan = program.memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes / 1e6


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_what_the_ring_holds(what):
    """The queries, out in float32 and two blocks that travel; backward also dq and two travelling gradients."""
    dim = 128
    queries, keys = BATCH * LENGTH * HEADS * dim, BATCH * LENGTH * KV_HEADS * 2 * dim  # numbers, not bytes
    bar = queries * (2 + 4) + 2 * keys * 2
    if what == "backward":
        bar += queries * 4 + 2 * keys * 4
    held = megabytes(ring_program("h100", 8, what, layout="zigzag"))
    assert held <= 1.15 * bar / 1e6, (held, bar / 1e6)


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("a100", {"layout": "zigzag", "packed": True, "mask": Mask(window=3000)}),
        ("b200", {"placed": True}),
        ("h100", {"layout": "striped", "softcap": 20.0, "alibi": True, "dropout_rate": 0.1, "dropout_seed": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_rings_compile(gpu, options, what):
    slopes = alibi_slopes(HEADS) if options.get("alibi") else None
    options = {name: value for name, value in options.items() if name != "alibi"}
    text = ring_program(gpu, 4, what, alibi_slopes=slopes, **options).as_text() or ""
    assert "collective-permute-start" in text
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize(
    ("gpu", "ring", "kernel"),
    [
        ("h100", 1, "auto"),
        pytest.param("a100", 4, "cudnn", marks=pytest.mark.slow),
        pytest.param("h100", 4, "cudnn", marks=pytest.mark.slow),
        pytest.param("b200", 4, "cudnn", marks=pytest.mark.slow),
    ],
)
def test_cudnn_compiles(gpu, ring, kernel):
    """It takes no cuDNN: plans are built where the program is loaded, and their work space is not counted here."""
    for what, name in (("forward", "__cudnn$fmhaSoftmax"), ("backward", "__cudnn$fmhaSoftmaxBackward")):
        text = ring_program(gpu, ring, what, layout="zigzag", kernel=kernel).as_text() or ""
        assert f'custom_call_target="{name}"' in text
        assert ring == 1 or "collective-permute-start" in text
