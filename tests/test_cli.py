"""The command line: arguments, exit statuses, and that wrong settings are reported before anything starts."""

import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

from ringjax.cli import main
from ringjax.config import Config, UserError, settings

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def training(monkeypatch):
    """A stand-in for ringjax.training that notes the settings of each run and does what it is told."""

    class Training(ModuleType):
        outcome: int | Exception = 0

        def __init__(self):
            super().__init__("ringjax.training")
            self.runs: list[Config] = []

        def run(self, config):
            self.runs.append(config)
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    module = Training()
    monkeypatch.setitem(sys.modules, "ringjax.training", module)
    return module


@pytest.mark.parametrize("status", [0, 75, 130])
def test_train_runs_the_settings_and_returns_its_status(training, status):
    training.outcome = status
    assert main(["train", QUICKSTART, "train.steps=30", "mesh.seq=2"]) == status
    (config,) = training.runs
    assert (config.train.steps, config.mesh.seq, config.run.dir) == (30, 2, "runs/quickstart")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--traceback", QUICKSTART, "train.steps=30", "mesh.seq=2"],
        [QUICKSTART, "--traceback", "train.steps=30", "mesh.seq=2"],
        [QUICKSTART, "train.steps=30", "--traceback", "mesh.seq=2"],
        [QUICKSTART, "train.steps=30", "mesh.seq=2", "--traceback"],
    ],
)
def test_options_may_stand_anywhere(training, arguments):
    assert main(["train", *arguments]) == 0
    assert (training.runs[0].train.steps, training.runs[0].mesh.seq) == (30, 2)


def test_wrong_settings_exit_2_with_every_problem(training, capsys):
    assert main(["train", QUICKSTART, "mesh.sqe=4", "train.steps=x"]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "command line: mesh.sqe=4: unknown key; did you mean mesh.seq?",
        "command line: train.steps=x: must be an integer >= 1, got 'x' (text)",
    ]
    assert out == ""
    assert training.runs == []


def test_user_error_is_one_message_without_traceback(training, capsys):
    training.outcome = UserError("the run folder is full")
    assert main(["train", QUICKSTART]) == 1
    assert capsys.readouterr().err == "error: the run folder is full\n"


@pytest.mark.parametrize(("override", "status"), [("run.seed=1", 1), ("run.seed=-1", 2)])
def test_traceback_on_request(training, capsys, override, status):
    training.outcome = UserError("the run folder is full")
    assert main(["train", QUICKSTART, override, "--traceback"]) == status
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_unexpected_errors_keep_their_traceback(training):
    training.outcome = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["train", QUICKSTART])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: CONFIG"),
        (
            ["train", QUICKSTART, "--mesh.seq=4"],
            "unknown option --mesh.seq=4; settings are given as key.path=value",
        ),
    ],
)
def test_wrong_arguments_exit_2(training, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert training.runs == []


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "ringjax train configs/quickstart.yaml" in shown
    assert max(map(len, shown.splitlines())) <= 115
    words = " ".join(shown.split())
    for key, setting in settings().items():
        assert f" {key}=" in shown
        assert f"{setting.description} [{setting.requirement}]" in words
    for line in ("optim.lr=0.001 ", "data.pattern='**/*.txt' ", "run.compilation_cache=null "):
        assert line in shown


def _python(*arguments: str, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_train_py_works_from_any_folder(tmp_path):
    done = _python(str(ROOT / "train.py"), "none.yaml", "mesh.sqe=4", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "none.yaml: no such file",
        "command line: mesh.sqe=4: unknown key; did you mean mesh.seq?",
    ]
    assert list(tmp_path.iterdir()) == []


def test_settings_are_read_before_a_device_is_touched():
    done = _python(
        "-c",
        "import sys\n"
        "from ringjax.cli import main\n"
        "from ringjax.config import load_config\n"
        "load_config('configs/quickstart.yaml')\n"
        "status = main(['train', 'configs/quickstart.yaml', 'mesh.seq=3'])\n"
        "from jax._src import xla_bridge\n"
        "loaded = [name for name in ('ringjax.training', 'flax', 'optax', 'orbax') if name in sys.modules]\n"
        "print(status, xla_bridge.backends_are_initialized(), loaded)",
    )
    assert (done.returncode, done.stdout) == (0, "2 False []\n"), done.stderr
