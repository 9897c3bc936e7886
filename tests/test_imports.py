"""Imports go one way, and importing does nothing: no backend is started, no environment is changed."""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# From the top down; a package imports from the layers below its own, and nothing from its neighbours in a layer.
LAYERS = (
    {"train", "__main__"},
    {"cli"},
    {"training", "inference", "convert"},
    {"models", "data", "optim"},
    {"parallel"},
    {"attention", "planner"},
    {"config"},
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}

# Where arithmetic on layouts, or the names of kernels, are needed; no device is touched by it.
ALLOWED = {
    ("ringjax.config.check", "ringjax.attention.layout"),
    ("ringjax.planner", "ringjax.attention.layout"),
    ("ringjax.planner.machine", "ringjax.attention.kernels"),
    # A finished run shows a sample of text.
    ("ringjax.training", "ringjax.inference"),
}

# Usable in anybody's model, or before anything is installed that computes.
THIRD_PARTY = {"attention": {"jax", "numpy"}, "config": {"pydantic", "yaml"}}


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Every module that the source of `module` imports, at any depth, with the line."""
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level], *(node.module or "").split(".")] if node.level else []
            name = ".".join(filter(None, base)) or node.module or ""
            # `from ringjax import models` names a package in what it imports, not in what it imports from.
            if name == "ringjax":
                yield from ((node.lineno, f"ringjax.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, name


def violations(source: str, module: str) -> list[str]:
    """Imports that go against the order of the layers.

    Args:
      source: Python text.
      module: the dotted name it has, packages with `.__init__`, as "ringjax.models.__init__"; "train" for train.py.
    """
    name = module.removesuffix(".__init__")
    own = name.removeprefix("ringjax").strip(".").split(".")[0]
    found = []
    for line, target in imported(source, module):
        root, _, inside = target.partition(".")
        theirs = inside.split(".")[0]
        if root != "ringjax":
            foreign = root not in sys.stdlib_module_names and root not in THIRD_PARTY.get(own, {root})
            if foreign:
                found.append(f"{module}:{line} imports {target}, but {own} uses {sorted(THIRD_PARTY[own])} only")
        elif own == theirs or not theirs or theirs == "__version__":
            continue
        elif theirs not in LEVEL:
            found.append(f"{module}:{line} imports {target}, which has no place in the layers")
        elif not any(_within(name, above) and _within(target, below) for above, below in ALLOWED) and (
            own not in LEVEL or own == "attention" or LEVEL[own] >= LEVEL[theirs]
        ):
            found.append(f"{module}:{line} imports {target}, against the order of the layers")
    return found


def _within(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def modules() -> dict[str, pathlib.Path]:
    """Every module of the project by its dotted name."""
    files = [*(ROOT / "ringjax").rglob("*.py"), ROOT / "train.py"]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


def test_every_import_goes_down():
    found = [problem for name, file in modules().items() for problem in violations(file.read_text("utf-8"), name)]
    assert not found, "\n".join(found)


def test_every_package_has_its_place():
    packages = {name.split(".")[1] for name in modules() if name.startswith("ringjax.")} - {"__init__"}
    assert packages >= {"config", "attention", "cli"}
    assert packages <= set(LEVEL)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringjax.models.decoder", "import ringjax.training"),
        ("ringjax.models.decoder", "from ringjax.data import packing"),
        ("ringjax.models.decoder", "from ringjax import data"),
        ("ringjax.models.decoder", "from ..data import packing"),
        ("ringjax.models.__init__", "from ..data import packing"),
        ("ringjax.models.decoder", "def f():\n    if True:\n        from ringjax.cli import main"),
        ("ringjax.inference.generate", "from ringjax.training import run"),
        ("ringjax.attention.ring", "from ringjax.config import Config"),
        ("ringjax.attention.ring", "import flax"),
        ("ringjax.config.load", "from ringjax.attention.layout import get_layout"),
        ("ringjax.config.check", "from ringjax.attention.ring import lap"),
        ("ringjax.config.check", "import jax"),
        ("ringjax.planner.memory", "from ringjax.attention import ring_attention"),
        ("ringjax.training.loop", "from ringjax.cli import main"),
        ("ringjax.models.decoder", "from ringjax.helpers import f"),
        ("ringjax.__init__", "from ringjax.attention import ring_attention"),
    ],
)
def test_wrong_imports_are_caught(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ringjax.models.decoder",
            "import flax\nfrom ringjax.parallel import mesh\nfrom ringjax.models.rope import rope",
        ),
        ("ringjax.models.decoder", "from .rope import rope\nfrom . import rope"),
        (
            "ringjax.models.decoder",
            "from ringjax.attention import ring_attention\nfrom ringjax.config import Config",
        ),
        ("ringjax.config.check", "from ringjax.attention.layout import get_layout\nimport math, yaml"),
        ("ringjax.planner.memory", "from ringjax.attention.layout import get_layout"),
        ("ringjax.attention.kernels.xla", "import jax.numpy as jnp\nfrom ringjax.attention.mask import Mask"),
        ("ringjax.cli", "from ringjax import __version__\nfrom ringjax.training import run"),
        ("train", "from ringjax.cli import main"),
    ],
)
def test_right_imports_pass(module, source):
    assert violations(source, module) == []


def test_importing_everything_starts_nothing():
    targets = {target for name, file in modules().items() for _, target in imported(file.read_text("utf-8"), name)}
    foreign = sorted(target for target in targets if target.partition(".")[0] != "ringjax")
    ours = sorted(name.removesuffix(".__init__") for name in modules())
    check = f"""
import importlib, os
from contextlib import suppress
for name in {foreign}:  # what other people's packages do on import is their affair
    with suppress(ImportError):  # an extra
        importlib.import_module(name)
before = dict(os.environ)
for name in {ours}:
    importlib.import_module(name)
from jax._src import xla_bridge
changed = [key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)]
print(xla_bridge.backends_are_initialized(), sorted(changed))
"""
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False []\n"), done.stderr
