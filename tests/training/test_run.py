"""`python train.py` as a person meets it: what it prints, how it stops, how it goes on, and what it refuses."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen

import pytest

import ringjax.training.trainer
from ringjax.cli import main
from ringjax.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
STEPS = 150  # enough for a signal to arrive before the last
RUN = (
    "mesh.seq=2",
    "data.batch=2",
    "model.mlp_dim=768",  # no checkpoint fits into LIMIT, however its arrays are put into files
    f"train.steps={STEPS}",
    "train.eval_every=50",
    "train.save_every=50",
    "train.sample_tokens=40",
)
LIMIT = 70_000  # bytes of a file; what a run writes besides checkpoints fits
LIMITED = """
import resource, runpy, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Command = Callable[..., list[str]]


@pytest.fixture(scope="session")
def command(small) -> Command:
    """The command line of a small run in a folder, with overrides."""

    def make(run_dir: Path, *overrides: str) -> list[str]:
        settings = small(run_dir, *RUN, *overrides).model_dump()
        words = [
            f"{name}.{key}={json.dumps(value)}" for name, keys in settings.items() for key, value in keys.items()
        ]
        return [str(ROOT / "configs" / "quickstart.yaml"), *words]

    return make


def start(arguments: list[str], environment: Mapping[str, str] = {}, limit: int = 0, **streams) -> Popen[str]:
    """`python train.py` on the CPU; with a limit, its files cannot grow past so many bytes, as on a full disk."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
    program = ["-c", LIMITED, str(limit)] if limit else []
    return Popen([sys.executable, *program, str(ROOT / "train.py"), *arguments], env=environment, **streams)


def finish(arguments: list[str], limit: int = 0) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a whole run."""
    process = start(arguments, limit=limit)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def stop_at(process: Popen[str], text: str, signal_number: int) -> tuple[int, str, str]:
    """Send a signal once a line of the output has the text; exit status and all output."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            process.send_signal(signal_number)
            break
    out, err = process.communicate(timeout=300)
    return process.returncode, seen + out, err


def records(folder: Path) -> list[dict]:
    """metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("tokens_per_s", "step_s", "data_wait_s")
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> tuple[Path, str]:
    """The folder and output of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    status, out, err = finish(command(folder))
    assert (status, err) == (0, "")
    return folder, out


def test_output_is_a_table_plain_lines_a_sample_and_where_things_are(whole):
    folder, out = whole
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    names = ["model", "parameters", "mesh", "sequence", "batch", "plan", "data", "run"]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    assert lines[2].split(maxsplit=1)[1].startswith("seq 2 (")
    assert "128 tokens, 64 on each device of the ring, zigzag" in lines[3]
    assert lines[len(names)] == f"CPU: 2 virtual devices on {os.cpu_count()} cores"
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert all("  loss " in line and "tok/s" in line for line in steps)
    assert all("  eta " in line for line in steps[:-1])
    evaluations = [line for line in lines if line.startswith("eval ")]
    assert [line.split()[2] for line in evaluations] == ["50", "100", "150"]
    assert all(line.endswith(" nats/byte") for line in evaluations)
    text = out[out.index("a sample of 40 tokens:\n") :]
    assert len(text) > len("a sample of 40 tokens:\n")
    for name in ("metrics.jsonl", "tensorboard", "checkpoints", "config.yaml"):
        assert str(folder / name) in text
        assert (folder / name).exists()


def test_running_it_again_trains_nothing_and_says_so(whole, command, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    status, out, err = finish(command(folder))
    assert (status, err) == (0, "")
    assert f"all {STEPS} steps are done; raise train.steps to train on" in out
    assert "step 1/" not in out
    assert [line for line in out.splitlines() if line.startswith("eval ")] == [
        line for line in whole[1].splitlines() if line.startswith(f"eval step {STEPS}")
    ]
    assert records(folder) == records(whole[0])


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_saves_and_the_same_command_goes_on(whole, command, tmp_path, name, status):
    folder = tmp_path / "run"
    ended, out, err = stop_at(start(command(folder)), "step 5/", signal.Signals[name])
    assert ended == status, err
    (saved,) = checkpoints(folder)
    assert 5 <= saved < STEPS
    last = out.splitlines()[-1]
    assert last == f"stopped by {name} after step {saved} of {STEPS}, saved in {folder}; the same command continues"
    (told,) = err.split("\n", 1)[1].splitlines()
    assert told.startswith(f"{name}: finishing this step, saving, then stopping")

    if name == "SIGTERM":
        ended, out, _ = finish(command(folder))
    else:
        ended, out = on_terminal(command(folder))
    assert ended == 0
    assert f"continuing from the checkpoint of step {saved} in" in out
    assert records(folder) == records(whole[0])
    # On a terminal the steps are a bar.
    assert ("\x1b[" in out) == ("━" in out) == (name == "SIGINT")
    assert f"step {STEPS}/{STEPS}" in out


def on_terminal(arguments: list[str]) -> tuple[int, str]:
    """Exit status and output of a run on a terminal."""
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": "200"}
    process = start(arguments, terminal, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b"".join(chunks(ours))
    os.close(ours)
    return process.wait(timeout=60), out.decode(errors="replace")


def chunks(descriptor: int) -> Iterator[bytes]:
    """What comes out of a terminal until its last user is gone, which Linux reports as an error."""
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:
            return
        if not chunk:
            return
        yield chunk


def test_a_signal_before_the_first_step_ends_it_at_once(command, tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder))
    ended, out, err = stop_at(process, "CPU: ", signal.SIGTERM)
    assert ended == 75, err
    assert out.splitlines()[-1] == "stopped by SIGTERM before the first step; the same command continues"
    assert "step 1/" not in out
    assert err.strip().startswith("SIGTERM: ")
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "checkpoints").exists()


def test_a_signal_while_getting_ready_is_obeyed_before_the_first_step(command, tmp_path, capfd, monkeypatch):
    def open_dataset(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    real = ringjax.training.trainer.open_dataset
    monkeypatch.setattr("ringjax.training.trainer.open_dataset", open_dataset)
    assert main(["train", *command(tmp_path / "run")]) == 130
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == "stopped by SIGINT before the first step; the same command continues"


def test_ctrl_c_outside_the_loop_is_one_line(command, tmp_path, capsys, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("ringjax.training.run", interrupted)
    assert main(["train", *command(tmp_path / "run")]) == 130
    assert capsys.readouterr() == (
        "",
        "stopped at once; the same command continues from the last checkpoint, if there is one\n",
    )


def refused(capsys, arguments: list[str], status: int = 1) -> str:
    """The one message of a run that is refused before its first line of output."""
    assert main(["train", *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ") or status == 2
    return err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read data.path={path}: No such file or directory"),
        (b"", "the corpus has no text"),
        (b"text \xff\xfe", "{path} must be UTF-8 text, but byte 5 (0xff) is not"),
        (b"short", "the training side of the corpus must fill one sequence of data.seq_len=128 tokens"),
    ],
    ids=["missing", "empty", "not text", "too small"],
)
def test_a_corpus_that_cannot_be_used(command, tmp_path, capsys, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    err = refused(capsys, [*command(tmp_path / "run"), f"data.path={path}"])
    assert message.format(path=path) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_length_that_the_layout_cannot_cut(command, tmp_path, capsys):
    err = refused(capsys, [*command(tmp_path / "run"), "data.seq_len=126"], status=2)
    assert "data.seq_len=126: 126 does not fit mesh.seq = 2" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_a_file(command, tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    assert f"run.dir must be a folder; {tmp_path / 'run'} is a file" in refused(capsys, command(tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_folder_where_nothing_can_be_written(command, capsys):
    err = refused(capsys, command(Path("/proc/run")))
    assert "run.dir must be a folder that can be written; /proc/run: " in err


def test_a_run_folder_in_use(command, tmp_path, capsys):
    with RunFolder(tmp_path / "run"):
        err = refused(capsys, command(tmp_path / "run"))
    assert f"{tmp_path / 'run'} is in use by another process (id {os.getpid()})" in err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_that_cannot_go_on_with_other_settings(whole, command, capsys):
    before = (whole[0] / "config.yaml").read_text()
    err = refused(capsys, [*command(whole[0]), "model.dim=64"])
    assert "model.dim: 32 -> 64" in err
    assert (whole[0] / "config.yaml").read_text() == before


def test_a_full_run_folder(command, tmp_path):
    status, out, err = finish(command(tmp_path / "run"), limit=10_000)
    assert (status, out) == (1, "")
    assert "run.dir must be a folder that can be written" in err
    assert "File too large" in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_fills_up(whole, command, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    # The metrics fit, a checkpoint does not.
    status, out, err = finish(command(folder), limit=LIMIT)
    assert status == 1
    assert f"step {STEPS}/{STEPS}" in out
    start = f"error: the checkpoint of step {STEPS} could not be written to {folder / 'checkpoints'}: File too large"
    assert err.startswith(start)
    assert err.count("\n") == 1
    assert checkpoints(folder) == [100]
    assert finish(command(folder))[0] == 0
    assert records(folder) == records(whole[0])
