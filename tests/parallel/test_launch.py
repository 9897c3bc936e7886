"""What a launcher says of processes that ended."""

import sys
from subprocess import Popen

import pytest

from ringjax.parallel import launch


def ended(*programs: str) -> list[Popen]:
    processes = [Popen([sys.executable, "-c", program]) for program in programs]
    for process in processes:
        process.wait()
    return processes


@pytest.mark.parametrize(
    ("programs", "status", "said"),
    [
        (("", ""), 0, ""),
        (("", "raise SystemExit(75)"), 75, ""),
        (
            ("", "import os; os.kill(os.getpid(), 9)"),
            137,
            "process 1 was ended by SIGKILL; the same command continues",
        ),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(capsys, programs, status, said):
    assert launch._wait(ended(*programs)) == status
    assert capsys.readouterr().err.startswith(said)
