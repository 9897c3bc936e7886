"""The CPU kernel: blocks of many tiles, bits, and how its code comes to be."""

import os
import stat
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ringjax.attention import Mask, ring_attention, ring_attention_shard
from ringjax.attention.kernels import CpuKernel, XlaKernel, cpu_library, get_kernel

BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5, "dsinks": 1e-5}


@pytest.mark.parametrize(
    ("ring", "layout", "options"),
    [
        # Several tiles and chunks of queries, the last ones not full, and head dims that fill no vector.
        (1, "contiguous", {"seq": 1100, "dim": 24, "value_dim": 40, "batch": 1, "heads": 2, "kv_heads": 1}),
        (2, "zigzag", {"seq": 600, "dim": 64, "value_dim": 128, "batch": 1}),
        (2, "striped", {"seq": 500, "mask": Mask(window=90), "packed": True}),
        (1, "contiguous", {"seq": 450, "mask": Mask(causal=False, window=30, prefix_length=70)}),
        (3, "zigzag", {"seq": 450, "placed": "shuffled", "mask": Mask(window=100)}),
        (1, "contiguous", {"seq": 300, "softcap": 20.0, "alibi": True, "dropout": 0.3, "with_sinks": True}),
        (1, "contiguous", {"structured": True, "packed": True}),
        (1, "contiguous", {"seq": 200, "heads": 6, "kv_heads": 1, "batch": 1}),
    ],
)
def test_blocks_of_many_tiles_equal_the_oracle(problem, ring, layout, options):
    case = problem(**options)
    errors = case.errors(case.run(ring, layout, CpuKernel(by_head=ring > 1)))
    assert all(error <= BARS[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"packed": True, "softcap": 2.0, "dropout": 0.2}], ids=["plain", "all"])
def test_errs_no_more_than_the_portable_kernel_in_short_floats(problem, dtype, options):
    case = problem(seq=300, dim=40, value_dim=24, dtype=dtype, **options)
    mine, portable = (case.errors(case.run(1, "contiguous", kernel)) for kernel in (CpuKernel(), XlaKernel()))
    assert all(mine[name] <= max(1.25 * portable[name], BARS[name]) for name in mine), (mine, portable)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_run_gives_the_same_bits(problem, dtype):
    # One head: its queries are shared out, and add to dk and dv in turn.
    case = problem(seq=1100, heads=2, kv_heads=1, batch=1, dim=32, value_dim=32, dtype=dtype)
    first = case.run(1, "contiguous", CpuKernel())
    for _ in range(5):
        for name, again in case.run(1, "contiguous", CpuKernel()).items():
            np.testing.assert_array_equal(first[name], again, err_msg=name)


def test_many_calls_at_once_all_finish(mesh_of):
    # 32 devices, far more than threads, each of which asks the pool for help.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32 * 80, 2, 8)), jnp.float32)
    results = [
        jax.jit(
            jax.grad(lambda x, kernel=kernel: (ring_attention(x, x, x, mesh=mesh_of(32), kernel=kernel) ** 2).sum())
        )(x)
        for kernel in (CpuKernel(), XlaKernel())
    ]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_works_inside_a_callers_shard_map_and_vmap(mesh_of, check_vma):
    mesh, blocks = mesh_of(2, stage=2), PartitionSpec(None, "seq")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 16, 2, 8)), jnp.float32)
    segments = jnp.asarray(np.repeat([0, 1, 2, 2], 4)[None].repeat(2, 0))

    def inside(kernel):
        def attend(x, segments):
            local = partial(ring_attention_shard, kernel=kernel, layout="zigzag")
            return jax.shard_map(
                lambda x, segments: local(x, x, x, segment_ids=segments),
                mesh=mesh,
                in_specs=(blocks, blocks),
                out_specs=blocks,
                check_vma=check_vma,
            )(x, segments)

        return attend

    def staged(kernel):
        def attend(x):
            return ring_attention(x, x, x, mesh=mesh, kernel=kernel, layout="zigzag")

        return lambda x, _: jax.vmap(attend, spmd_axis_name="stage")(x)

    for make, inputs in ((inside, (x[0], segments)), (staged, (x, segments))):
        attends = [make(kernel) for kernel in (CpuKernel(), XlaKernel())]
        losses = [lambda x, s, attend=attend: (attend(x, s) ** 2).sum() for attend in attends]
        mine, theirs = (jax.jit(jax.value_and_grad(loss))(*inputs) for loss in losses)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), mine, theirs)


def test_code_for_any_cpu_of_the_architecture_is_as_exact(problem):
    case = problem(seq=300, dim=24, value_dim=40, packed=True, softcap=2.0, dropout=0.2)
    errors = case.errors(case.run(1, "contiguous", CpuKernel(flags=())))
    assert all(error <= BARS[name] for name, error in errors.items()), errors


def test_without_a_compiler_auto_is_portable_and_the_name_is_refused(monkeypatch, caplog, mesh_of):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel = CpuKernel(flags=("-DOF_THIS_TEST",))
    x = jnp.ones((1, 8, 1, 4))
    with caplog.at_level("INFO", "ringjax"), pytest.raises(ValueError, match=r"'cpu' cannot.*CXX=no-such-compiler"):
        ring_attention(x, x, x, mesh=mesh_of(1), kernel=kernel)
    assert "CXX=no-such-compiler is not there: install one, or set CXX" in caplog.text

    monkeypatch.setattr(cpu_library, "_targets_or_problem", lambda flags: "there is none")
    y = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 1, 4)), jnp.float32)
    chosen, portable = (
        ring_attention(y, y, y, mesh=mesh_of(1), kernel=kernel) for kernel in (get_kernel("auto", "cpu"), "xla")
    )
    np.testing.assert_array_equal(chosen, portable)


@pytest.fixture
def small_source(monkeypatch, tmp_path):
    """A folder for compiled code, and a source that compiles at once; a function counts compilations."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "attention.cc").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(cpu_library, "SOURCE", source)
    monkeypatch.setenv("RINGJAX_CACHE_DIR", str(tmp_path / "cache"))
    compiled, compile_source = [], cpu_library._compile
    monkeypatch.setattr(cpu_library, "_compile", lambda *args: (compiled.append(args[-1]), compile_source(*args)))
    return source, tmp_path / "cache" / "kernels", compiled


def test_code_is_compiled_once_and_kept_for_its_user(small_source):
    source, folder, compiled = small_source
    found = []
    threads = [threading.Thread(target=lambda: found.append(cpu_library._built(()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(compiled) == 1
    assert {path.name for path in folder.iterdir()} == {found[0].name, "lock"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Another source, or other flags, are other code.
    other = cpu_library._built(("-DOTHER",))
    (source / "attention.cc").write_text('extern "C" int answer() { return 43; }\n')
    assert len({found[0], other, cpu_library._built(())}) == len(compiled) == 3


def test_code_that_others_could_have_written_is_not_loaded(small_source):
    folder = small_source[1]
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)
    with pytest.raises(cpu_library.NoLibraryError, match=r"can be written by others.*chmod 700"):
        cpu_library._built(())


def test_a_failed_compilation_says_why_and_leaves_nothing(small_source):
    source, folder, _ = small_source
    (source / "attention.cc").write_text("this is no C++\n")
    with pytest.raises(cpu_library.NoLibraryError, match=r"does not compile it .*error.*set CXX"):
        cpu_library._built(())
    assert [path.name for path in folder.iterdir()] == ["lock"]
