"""How long the train step of an 8B decoder takes to compile here, for machines of more and more devices.

    python benchmarks/compile_time.py v5p:2x4x4 v5p:4x4x8 v5p:8x8x8     # with the extra tpu
    python benchmarks/compile_time.py h100:4x8 h100:16x8 h100:64x8      # with the extra cuda13-compiler

Every machine is one ring, with 8,192 tokens on each device; each is compiled by a process of its own. The program
does not grow with the ring, so neither should the time. Where other work runs on the machine, compare the seconds for
which the process had a CPU: the others then say how long one waits in company.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from datetime import date
from math import prod
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
CONFIG = "configs/run/8b_1m_v5p_256.yaml"
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"
TOKENS = 8192  # on each device


def measured(topology: str) -> dict[str, float]:
    """What one process found and needed."""
    devices = prod(map(int, topology.split(":")[1].split("x")))
    settings = [f"mesh.seq={devices}", f"data.seq_len={devices * TOKENS}", "run.platform=auto"]
    if devices > 4096:
        raise SystemExit(f"{topology}: parameters are stored in at most 4096 pieces")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "program.txt"
        command = ["compile", CONFIG, "--topology", topology, "--json", "--save-text", str(text), *settings]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{topology}: {done.stderr}")
        found = json.loads(done.stdout)
        return {
            "devices": devices,
            "lower": found["lower_s"],
            "compile": found["compile_s"],
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "lines": text.read_text().count("\n"),
            "free": 1 - found["memory"]["peak"] / found["memory"]["available"],
        }


def main() -> None:
    """Compile for the machines on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("topology", nargs="+", help="as v5p:4x4x8 or h100:64x8")
    topologies = parser.parse_args().topology
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"command: python benchmarks/compile_time.py {' '.join(topologies)}\n")
    print(
        f"{'':14}{'devices':>8}{'lower s':>9}{'compile s':>11}{'CPU s':>8}{'load':>7}{'program lines':>15}{'free':>7}"
    )
    for topology in topologies:
        row = measured(topology)
        load = os.getloadavg()[1]  # processes that want a CPU, over the last five minutes; ours is one or two of them
        print(
            f"{topology:14}{row['devices']:8,}{row['lower']:9.0f}{row['compile']:11.0f}{row['cpu']:8.0f}{load:7.1f}"
            f"{row['lines']:15,}{row['free']:7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
