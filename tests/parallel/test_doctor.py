"""The diagnosis of installations, sound and broken."""

import re

import jax
import pytest

from ringjax.cli import main
from ringjax.parallel import doctor

SOUND = {"jax": "0.10.2", "jaxlib": "0.10.2"}
BOTH = {f"jax-cuda{number}-{half}": "0.10.2" for number in (12, 13) for half in ("plugin", "pjrt")}


@pytest.mark.parametrize(
    ("plugins", "packages", "message"),
    [
        ({}, {"jax": "0.10.2", "jaxlib": "0.10.1"}, "jax 0.10.2 and jaxlib 0.10.1 are of different versions"),
        ({}, {"jax": "0.10.2"}, "jaxlib missing"),
        (
            {f"jax-cuda{n}-{half}": "0.10.2" for n in (12, 13) for half in ("plugin", "pjrt")},
            SOUND,
            "are both installed",
        ),
        ({"jax-cuda13-plugin": "0.9.0", "jax-cuda13-pjrt": "0.10.2"}, SOUND, "plugin 0.9.0 does not go with jaxlib"),
        ({"jax-cuda13-plugin": "0.10.2"}, SOUND, r"jax-cuda13-pjrt is missing.*ringjax\[cuda13\]"),
    ],
)
def test_clashes_are_problems(plugins, packages, message):
    (problem,) = doctor._clashes(packages, plugins)
    assert re.search(message, problem)


def test_sound_installations_have_none():
    assert not [*doctor._clashes(SOUND, {})]
    plugins = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
    assert not [*doctor._clashes(SOUND, plugins)]
    assert not [*doctor._clashes({"jax": "0.12.0.1", "jaxlib": "0.12.0"}, {"libtpu": "0.0.52"})]


def test_doubts(monkeypatch):
    monkeypatch.setattr(doctor, "_addresses", lambda: ["127.0.1.1"])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    plugins = {"libtpu": "0.0.52", "jax-cuda13-plugin": "0.10.2"}
    found = "\n".join(doctor._doubts(plugins, jax.devices()))
    for part in (
        "both installed",
        "jax finds none",
        "means this machine alone (127.0.1.1)",
        "LD_LIBRARY_PATH may put",
    ):
        assert part in found


def test_the_command_ends_with_a_verdict(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(maxsplit=1) == ["verdict", "ready"]
    assert any(line.startswith("devices") and "32 x cpu" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("no GPU found\nmore"), "no GPU found"), (AssertionError(), "no plugin for")]
)
def test_devices_that_do_not_start_are_a_problem(monkeypatch, capsys, error, reason):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"jax cannot start its devices: {reason}" in out
    assert out.endswith("1 problem to solve first\n")


def test_it_takes_no_settings(capsys):
    assert main(["doctor", "mesh.seq=2"]) == 2
    assert "takes no settings" in capsys.readouterr().err
