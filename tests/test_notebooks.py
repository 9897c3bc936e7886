"""Notebooks run from top to bottom, and what is shown of them was made by one such run and names no machine.

After a change, run them again and keep the outputs:

    jupyter execute --inplace --NotebookClient.record_timing=False notebooks/*.ipynb
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 600_000

# From the root of a file system or a drive; not the slash of a unit, a URL, a relative path or a closing tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w.~/:<-])/(?:[\w.-]+/)+[\w.-]*|\b[A-Za-z]:\\\w")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: pathlib.Path) -> list[nbformat.NotebookNode]:
    """The code of a notebook, in order."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def texts(cell: nbformat.NotebookNode) -> Iterator[str]:
    """What a person can read in the outputs of a cell."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield from (str(data) for kind, data in output.get("data", {}).items() if not kind.startswith("image/"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_is_valid_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MOST_BYTES


@each_notebook
def test_devices_are_set_before_ringjax_is_imported(path):
    first = code_cells(path)[0].source
    assert 'jax.config.update("jax_num_cpu_devices", 8)' in first
    assert "ringjax" not in first


@each_notebook
def test_outputs_are_of_one_clean_run(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not [match[0] for cell in cells for text in texts(cell) for match in ABSOLUTE_PATH.finditer(text)]


@pytest.mark.parametrize("text", ["in /home/a/runs", "/tmp/x", "(/usr/lib/python3", "'/a/b.py'", r"C:\Users", "=/a/"])
def test_absolute_paths_are_seen(text):
    assert ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize("text", ["tok/s", "S / R", "configs/a.yaml", "../a/b", "https://a.org/b/c", "</b>", "1/2/3"])
def test_other_slashes_are_not(text):
    assert not ABSOLUTE_PATH.search(text)


@pytest.mark.slow
@each_notebook
def test_runs(path, tmp_path, monkeypatch):
    """A cell that raises fails the test. The kernel is this interpreter, whatever kernels the machine has."""
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
        "env": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec), "utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
