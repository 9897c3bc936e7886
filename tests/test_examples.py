"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pathlib
import pkgutil

import pytest

import ringjax

MODULES = [module.name for module in pkgutil.walk_packages(ringjax.__path__, "ringjax.")]
WITH_EXAMPLES = 17  # modules; a walk that finds none must not pass


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(pathlib.Path(__file__).parents[1] / "configs")
    monkeypatch.chdir(tmp_path)  # what an example writes, it writes here
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    modules = [importlib.import_module(name) for name in MODULES]
    examples = [any(test.examples for test in doctest.DocTestFinder().find(module)) for module in modules]
    assert sum(examples) >= WITH_EXAMPLES
