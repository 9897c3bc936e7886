"""A checkpoint is whole or does not count, and comes back bit for bit on any mesh."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.training.checkpoint import CheckpointError, Checkpoints


def mesh_of(data: int, tensor: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def state_on(mesh: jax.sharding.Mesh, seed: int = 0) -> dict:
    """A state with an nnx.State, a bfloat16 leaf and a scalar, sharded over both axes."""
    rng = np.random.default_rng(seed)

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    kernel = put(rng.standard_normal((16, 8)).astype(np.float32), "data", "tensor")
    scale = put(jnp.asarray(rng.standard_normal(8), jnp.bfloat16), "tensor")
    params = nnx.State({"dense": {"kernel": nnx.Param(kernel)}, "scale": nnx.Param(scale)})
    return {"step": put(np.int32(seed)), "params": params, "moments": (put(np.ones((8, 8), np.float32)),)}


def abstract_of(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=3) as opened:
        yield opened


def folder_of(tmp_path: Path, step: int) -> Path:
    return tmp_path / "checkpoints" / f"{step:08d}"


def array_file(tmp_path: Path, step: int) -> Path:
    """The biggest file that Orbax wrote, which holds array data."""
    stored = (folder_of(tmp_path, step) / "arrays").rglob("*")
    return max((p for p in stored if p.is_file()), key=lambda p: p.stat().st_size)


def test_restores_bitwise_onto_the_mesh_it_was_saved_on_and_onto_others(checkpoints):
    state = state_on(mesh_of(4, 2))
    checkpoints.save(3, state)
    for mesh in (mesh_of(4, 2), mesh_of(2, 4), mesh_of(1, 1)):
        want = state_on(mesh)
        step, got = checkpoints.restore(abstract_of(want))
        assert step == 3
        assert_same(got, want)


def test_background_save_keeps_what_was_there_when_it_was_called(checkpoints):
    """The next steps reuse the donated buffers, or free them, while the save is still going on."""
    mesh = mesh_of(4, 2)
    state = state_on(mesh)
    large = NamedSharding(mesh, PartitionSpec("data"))
    state["large"] = jax.device_put(np.arange(1 << 20, dtype=np.float32), large)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    target = abstract_of(state)
    checkpoints.save(1, state)
    for _ in range(3):
        state = overwrite(state)
    jax.tree.map(lambda x: x.delete(), jax.block_until_ready(state))
    _, got = checkpoints.restore(target)
    want = state_on(mesh)
    want["large"] = jax.device_put(np.arange(1 << 20, dtype=np.float32), large)
    assert_same(got, want)


def test_keeps_the_newest_and_leaves_nothing_else(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state_on(mesh_of(1, 1), step))
        checkpoints.wait()
        assert checkpoints.steps() == [20, 30]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["00000020", "00000030"]


def test_saving_a_step_again_replaces_it_unless_it_is_the_current_one(checkpoints):
    mesh = mesh_of(1, 1)
    checkpoints.save(1, state_on(mesh, 1))
    checkpoints.save(2, state_on(mesh, 2))
    checkpoints.save(2, state_on(mesh, 3))
    step, got = checkpoints.restore(abstract_of(state_on(mesh)))
    assert (step, int(got["step"])) == (2, 2)
    checkpoints.save(1, state_on(mesh, 4), wait=True)
    _, got = checkpoints.restore(abstract_of(state_on(mesh)), step=1)
    assert int(got["step"]) == 4


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip_bit, truncate, remove])
@pytest.mark.parametrize("which", ["arrays", "manifest"])
def test_damage_is_found_and_the_newest_whole_step_is_used(checkpoints, tmp_path, caplog, damage, which):
    mesh = mesh_of(2, 2)
    for step in (1, 2, 3):
        checkpoints.save(step, state_on(mesh, step))
    checkpoints.wait()
    bad = array_file(tmp_path, 3) if which == "arrays" else folder_of(tmp_path, 3) / "manifest.json"
    damage(bad)
    left = sorted(tmp_path.rglob("*"))
    with caplog.at_level(logging.WARNING):
        step, got = checkpoints.restore(abstract_of(state_on(mesh)))
    assert step == 2
    assert_same(got, state_on(mesh, 2))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "step 3" in warning
    assert bad.name in warning
    assert "using step 2" in warning
    assert sorted(tmp_path.rglob("*")) == left
    with pytest.raises(CheckpointError, match=r"step 3 .* is damaged"):
        checkpoints.restore(abstract_of(state_on(mesh)), step=3)


def test_a_damaged_step_is_replaced_when_the_run_reaches_it_again(checkpoints, tmp_path):
    mesh = mesh_of(1, 1)
    for step in (1, 2):
        checkpoints.save(step, state_on(mesh, step))
    checkpoints.wait()
    flip_bit(array_file(tmp_path, 2))
    assert checkpoints.restore(abstract_of(state_on(mesh)))[0] == 1
    checkpoints.save(2, state_on(mesh, 2))
    step, got = checkpoints.restore(abstract_of(state_on(mesh)))
    assert step == 2
    assert_same(got, state_on(mesh, 2))


def test_nothing_whole_or_nothing_at_all_is_an_error(checkpoints, tmp_path):
    target = abstract_of(state_on(mesh_of(1, 1)))
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoints.restore(target)
    checkpoints.save(1, state_on(mesh_of(1, 1)), wait=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; it has \[1\]"):
        checkpoints.restore(target, step=7)
    truncate(array_file(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*step 1.*instead of"):
        checkpoints.restore(target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t | {"moments": (t["step"],)},
            r"moments/0 is required as int32\[\] and stored as float32\[8,8\]",
        ),
        (
            lambda t: t | {"step": jax.ShapeDtypeStruct((), jnp.float32, sharding=t["step"].sharding)},
            r"step is required as float32\[\] and stored as int32\[\]",
        ),
        (lambda t: t | {"extra": t["step"]}, r"extra is required as int32\[\] and stored as nothing"),
        (lambda t: {"step": t["step"], "params": t["params"]}, r"moments/0 is required as nothing and stored as"),
    ],
)
def test_a_state_of_another_shape_dtype_or_structure_is_refused_by_name(checkpoints, change, message):
    state = state_on(mesh_of(1, 1))
    checkpoints.save(1, state)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(change(abstract_of(state)))


def test_unwritable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1) as checkpoints,
        pytest.raises(CheckpointError, match=r"file/checkpoints: Not a directory\. .* bytes and [\d,]+ are free"),
    ):
        checkpoints.save(1, state_on(mesh_of(1, 1)))


# A file-size limit stands for the full disk: the system refuses the write half-way in both cases.
FULL_DISK = """
    import resource, sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from ringjax.training.checkpoint import CheckpointError, Checkpoints

    jax.config.update("jax_platforms", "cpu")
    state = {"w": jax.random.normal(jax.random.key(0), (1 << 18,))}
    folder = Path(sys.argv[1])
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        checkpoints.save(2, state)
        try:
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
        print(sorted(path.name for path in folder.iterdir()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        target = {"w": jax.ShapeDtypeStruct(state["w"].shape, jnp.float32, sharding=state["w"].sharding)}
        step, got = checkpoints.restore(target)
        print(step, bool((got["w"] == state["w"]).all()))
        checkpoints.save(3, state, wait=True)
        print(checkpoints.steps())
"""


def test_full_disk_is_explained_and_harms_nothing(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        check=True,
    )
    error, present, restored, after = ran.stdout.splitlines()
    assert "step 2 could not be written" in error
    assert os.strerror(27) in error
    assert "1,048,576 bytes" in error
    assert present == "['00000001']"
    assert restored == "1 True"
    assert after == "[3]"
    assert ran.stderr == ""


def test_a_failed_background_save_surfaces_at_the_next_call(checkpoints, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    state = state_on(mesh_of(1, 1))
    checkpoints.save(1, state, wait=True)
    checkpoints.check()
    with monkeypatch.context() as patched:
        patched.setattr("ringjax.training.checkpoint._write_manifest", full)
        checkpoints.save(2, state)
        with pytest.raises(CheckpointError, match=r"step 2 .* No space left on device"):
            checkpoints.save(3, state)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    checkpoints.save(3, state, wait=True)
    assert checkpoints.steps() == [1, 3]


KILLED = """
    import os, sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    import ringjax.training.checkpoint as checkpoint

    jax.config.update("jax_platforms", "cpu")
    with checkpoint.Checkpoints(Path(sys.argv[1]), keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(100)}, wait=True)
        victim, name = {"manifest": (checkpoint, "_write_manifest"), "rename": (checkpoint, "_sync"),
                        "delete": (checkpoint.shutil, "rmtree")}[sys.argv[2]]
        setattr(victim, name, lambda *_, **__: os.kill(os.getpid(), 9))
        checkpoints.save(2, {"w": jnp.ones(100)}, wait=True)
"""


@pytest.mark.parametrize(("moment", "expected"), [("manifest", 1), ("rename", 2), ("delete", 2)])
def test_killed_at_any_moment_leaves_whole_checkpoints(tmp_path, moment, expected):
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), moment]
    assert subprocess.run(command, capture_output=True).returncode == -9
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(folder, keep=1) as checkpoints:
        step, state = checkpoints.restore({"w": jax.ShapeDtypeStruct((100,), jnp.float32, sharding=place)})
        assert step == expected
        assert float(state["w"][0]) == expected - 1
        checkpoints.save(3, state, wait=True)
    assert [p.name for p in folder.iterdir()] == ["00000003"]
