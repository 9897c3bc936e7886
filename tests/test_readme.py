"""What the README shows works: its code runs, its files exist, its commands are those of this project."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from ringjax.cli import main
from ringjax.config import load_config

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(marker: str) -> list[str]:
    """Fenced blocks that follow the comment <!-- marker -->."""
    return re.findall(rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", README, re.DOTALL)


def test_code_runs_as_printed():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    code = "\n".join(blocks("run"))  # later blocks use names of the earlier ones
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(blocks("run")[0].splitlines()) <= 20


def test_there_are_the_two_commands_and_code():
    assert len(blocks("run")) == 2
    assert len(blocks("command: train")) == len(blocks("command: test")) == 1
    assert blocks("command: train")[0].count("\n") == blocks("command: test")[0].count("\n") == 1


@pytest.mark.parametrize("line", re.findall(r"train\.py (configs/.*)", README))
def test_settings_of_printed_commands_are_legal(line):
    path, *overrides = shlex.split(line.strip("`"))
    load_config(ROOT / path, overrides)


def test_the_printed_plan_is_what_is_planned(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, *words = shlex.split(blocks("command: plan")[0])
    assert main(words) == 0
    planned = capsys.readouterr().out.splitlines()
    printed = blocks("output: plan")[0].splitlines()
    assert [line for line in printed if line != "..." and line not in planned] == []


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists(), path
