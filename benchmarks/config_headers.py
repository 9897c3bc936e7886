"""Compile the configs of `configs/run` and write what came of it into their headers.

    python benchmarks/config_headers.py configs/run/*h100*.yaml     # with the extra cuda13-compiler
    python benchmarks/config_headers.py configs/run/*v5p*.yaml      # with the extra tpu

A header names the command that compiles the config, on a line of its own. Behind it stand the lines that the command
prints of the machine, the memory and the ring, as it prints them. Run this again whenever the program of a step has
changed: a test compiles one of the configs and compares.
"""

import re
import sys
from pathlib import Path

from ringjax.config import load_config
from ringjax.parallel import get_topology
from ringjax.training.ahead import forecast

SHOWN = ("topology", "memory", "host memory", "ring")
COMMAND = re.compile(r"^# ringjax compile (\S+) --topology (\S+)\n((?:#   .*\n)*)", re.MULTILINE)


def rewritten(text: str, printed: str) -> str:
    """A config with the lines of its header replaced.

    Args:
      text: of the config.
      printed: by the command in its header.
    """
    lines = [line for line in printed.splitlines() if line.startswith(SHOWN)]
    return COMMAND.sub(
        lambda found: found[0].splitlines(keepends=True)[0] + "".join(f"#   {line}\n" for line in lines), text
    )


def main() -> None:
    """Go through the files that are named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        command = COMMAND.search(path.read_text())
        if command is None:
            raise SystemExit(f"{path}: no line '# ringjax compile {path} --topology NAME'")
        result, _ = forecast(load_config(path), get_topology(command[2]))
        print(f"{path}\n{result}\n", flush=True)
        path.write_text(rewritten(path.read_text(), str(result)))


if __name__ == "__main__":
    main()
