"""The operator works where nothing but jax and numpy is installed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.metadata
import sys

allowed = {"jax", "jaxlib", "numpy", "ringjax"} | {"ml_dtypes", "opt_einsum", "scipy"}  # the latter jax needs itself
blocked = set(importlib.metadata.packages_distributions()) - allowed


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)


sys.meta_path.insert(0, Block())
for other in ("flax", "optax", "einops", "chex", "pydantic", "orbax"):
    try:
        __import__(other)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{other} is not blocked")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from ringjax.attention import get_layout, reference_attention, ring_attention

mesh = jax.make_mesh((2,), ("seq",), (jax.sharding.AxisType.Auto,))
x = jax.random.normal(jax.random.key(0), (1, 16, 2, 4))
order = get_layout("zigzag")


def loss(x):
    return (ring_attention(x, x, x, mesh=mesh, layout="zigzag") ** 2).sum()


found = order.unpermute(jax.grad(loss)(order.permute(x, 2)), 2)
want = jax.grad(lambda x: (reference_attention(x, x, x)[0] ** 2).sum())(x)
assert abs(found - want).max() < 1e-5
print("exact")
"""


def test_works_with_jax_and_numpy_only():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "exact"
