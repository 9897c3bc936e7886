"""The command `ringjax`: reads arguments, calls the package, turns the user's mistakes into messages.

Exit status: 0 done; 1 a mistake of the user, or a run that does not fit its machine; 2 a mistake in the arguments or
settings; 75 stopped by SIGTERM and 130 by Ctrl-C, after saving. Anything unexpected keeps its traceback.
"""

import argparse
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ringjax.config import ConfigError, UserError, load_config, sections, settings
from ringjax.config.dialect import shown

_HELP_WIDTH = 108
_FIRST_PROCESS = ("processes.index=0", "processes.coordinator=127.0.0.1:1")
_TRAIN_EXAMPLES = """\
examples:
  ringjax train configs/quickstart.yaml
  ringjax train configs/quickstart.yaml mesh.seq=2 data.seq_len=8192 optim.lr=3e-4
  ringjax train configs/quickstart.yaml data.source=text data.path=books 'data.pattern=**/*.md'

From a checkout, `python train.py` does the same as `ringjax train`. Running the same command again continues the
run in run.dir. Values are written as in YAML; null unsets one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments without the program's name; None = those of this process.

    Returns:
      The exit status.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positional arguments that follow an option: `train x.yaml --traceback mesh.seq=2`.
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"unknown option {' '.join(unknown)}; settings are given as key.path=value, without dashes")
    args.overrides += rest
    try:
        return args.command(args)
    except UserError as error:
        if args.traceback:
            traceback.print_exc()
        else:
            print(error if isinstance(error, ConfigError) else f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:  # before a run listens for it, or the second one
        if args.traceback:
            traceback.print_exc()
        print(
            "stopped at once; the same command continues from the last checkpoint, if there is one", file=sys.stderr
        )
        return 130


def _parser() -> argparse.ArgumentParser:
    """All subcommands; each sets `command` to the function that runs it."""
    parser = argparse.ArgumentParser(
        prog="ringjax", description="Train transformers on sequences that no single device can hold."
    )
    parser.add_argument("--version", action="version", version=f"ringjax {_version()}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(subparsers)
    _add_launch(subparsers)
    _add_plan(subparsers)
    _add_compile(subparsers)
    _add_doctor(subparsers)
    return parser


def _version() -> str:
    """Of the installed package."""
    try:
        return version("ringjax")
    except PackageNotFoundError:  # a checkout on the path
        return "not installed"


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """A file and overrides."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file with the settings that differ from the defaults")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="settings that replace those of the file"
    )


class _Once(argparse.Action):
    """Stores a value, and refuses a second one: which of two was meant nobody can know."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "is there twice; leave one out")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _whole(text: str) -> int:
    """A whole number in plain digits; Python's own would also take 4_0."""
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    """A number; Python's own would also take 1_0."""
    try:
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, as 1e12, got {text!r}") from None


def _print(result: object) -> None:
    """To standard output, of which a reader may close the other end: `ringjax plan ... | head -1`."""
    try:
        print(result, flush=True)
    except OSError as error:
        # Python would try again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"cannot write the result: {error.strerror}") from error


def _add_traceback(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error was found")


def _add_train(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`ringjax train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, or continue a run",
        usage="ringjax train CONFIG [key.path=value ...] [--traceback]",
        description="Train the model that a YAML file describes, or continue its run.",
        epilog=f"{_TRAIN_EXAMPLES}\n\n{_settings_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_settings(parser)
    _add_traceback(parser)
    parser.set_defaults(command=_train)


def _add_launch(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`ringjax launch local`."""
    parser = subparsers.add_parser(
        "launch",
        help="train with several processes on this machine",
        usage="ringjax launch local --procs N CONFIG [key.path=value ...] [--traceback]",
        description="Start a run of several processes on this machine, as a cluster would start one on each host. "
        "Each process gets its share of the mesh's virtual CPU devices.",
        epilog="example:\n  ringjax launch local --procs 2 configs/quickstart.yaml mesh.seq=8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", choices=["local"], help="on this machine")
    parser.add_argument("--procs", action=_Once, type=_whole, required=True, metavar="N", help="processes")
    _add_settings(parser)
    _add_traceback(parser)
    parser.set_defaults(command=_launch)


def _add_plan(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`ringjax plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict a run's memory and time on a machine, and choose a mesh",
        usage="ringjax plan CONFIG (--hardware NAME [--devices N] | --topology NAME) [key.path=value ...] [--advise] "
        "[--json] [--plot FILE]",
        description="Predict what a run needs and how fast it goes, by arithmetic: no accelerator, no compiler, a "
        "few seconds. What is assumed of a chip can be replaced by what was measured (--hardware-file).",
        epilog="examples:\n  ringjax plan configs/quickstart.yaml --hardware h100 --devices 4\n"
        "  ringjax plan configs/quickstart.yaml --topology v5p:4x4x8 --advise",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_settings(parser)
    parser.add_argument("--hardware", action=_Once, metavar="NAME", help="the chip, as h100 or v5p")
    parser.add_argument(
        "--devices", action=_Once, type=_whole, metavar="N", help="how many; default: those of the mesh"
    )
    parser.add_argument(
        "--topology", action=_Once, metavar="NAME", help="instead of both: as v5p:4x4x8, h100:8 or h100:4x8"
    )
    parser.add_argument(
        "--hardware-file", action=_Once, metavar="FILE", help="YAML with chips of one's own and measured rates"
    )
    parser.add_argument(
        "--network", action=_Once, metavar="NAME", help="between hosts of GPUs: 100g, 200g or 400g for each GPU"
    )
    parser.add_argument(
        "--documents", action=_Once, metavar="N,N,...", help="tokens of the documents of a row, again and again"
    )
    parser.add_argument("--tokens", action=_Once, type=_number, metavar="N", help="to train on in all, as 1e12")
    parser.add_argument("--advise", action="store_true", help="rank all meshes and strategies that fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", action=_Once, metavar="FILE", help="draw timeline, memory and ring sizes (extra plot)"
    )
    _add_traceback(parser)
    parser.set_defaults(command=_plan)


def _plan(args: argparse.Namespace) -> int:
    """Load the settings, predict, and print."""
    config = load_config(args.config, args.overrides)
    if args.plot is not None:
        _check_writable("--plot", args.plot)
    from ringjax.planner.plan import Plan
    from ringjax.planner.request import answer

    vocab_size = config.model.vocab_size
    if vocab_size is None:
        from ringjax.data import get_tokenizer
        from ringjax.training.programs import choose_vocab_size

        vocab_size = choose_vocab_size(config, get_tokenizer(config.data.tokenizer).vocab_size)
    result = answer(
        config,
        vocab_size,
        hardware=args.hardware,
        devices=args.devices,
        topology=args.topology,
        hardware_file=args.hardware_file,
        network=args.network,
        documents=args.documents,
        tokens=args.tokens,
        advise=args.advise,
        plot=args.plot,
    )
    _print(json.dumps(result.as_dict()) if args.json else result)
    return 1 if isinstance(result, Plan) and not result.fits else 0


def _add_compile(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`ringjax compile`."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a run's train step for a machine that is not here",
        usage="ringjax compile CONFIG --topology NAME [key.path=value ...] [--json] [--save-text FILE]",
        description="Compile the whole train step for a TPU slice or for NVIDIA GPUs, without either, and say what "
        "it needs of each device: memory, FLOPs, whether every hop of the ring runs under a kernel, and what is sent "
        "over which axis. The extra for the machine (tpu or cuda13-compiler) must be installed.",
        epilog="examples:\n  ringjax compile configs/quickstart.yaml --topology v5e:2x2\n"
        "  ringjax compile configs/quickstart.yaml --topology h100:4 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_settings(parser)
    parser.add_argument(
        "--topology",
        action=_Once,
        required=True,
        metavar="NAME",
        help="v4, v5e, v5p, v6e or tpu7x and the sides of the slice in chips, as v5p:4x4x8; or a100, h100, h200 or "
        "b200 and the GPUs, or hosts x GPUs, as h100:8 or h100:4x8",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save-text", action=_Once, metavar="FILE", help="write the program's text there")
    _add_traceback(parser)
    parser.set_defaults(command=_compile)


def _compile(args: argparse.Namespace) -> int:
    """Load the settings, compile, and print what came of it."""
    config = load_config(args.config, args.overrides)
    if args.save_text is not None:
        _check_writable("--save-text", args.save_text)
    from ringjax.training.ahead import check_machine, forecast

    check_machine(config, args.topology)  # before anything that takes time, or needs a plugin
    from ringjax.parallel import get_topology

    result, text = forecast(config, get_topology(args.topology))
    _print(json.dumps(asdict(result)) if args.json else result)
    if args.save_text is not None:
        try:
            Path(args.save_text).write_text(text)
        except OSError as error:
            raise UserError(f"cannot write --save-text {args.save_text}: {error.strerror}") from error
    return 0


def _check_writable(option: str, name: str) -> None:
    """Whether a file can be written, before the work whose result goes there."""
    path = Path(name)
    if not name or path.is_dir():
        raise ConfigError([f"{option} needs the name of a file, got {name!r}"])
    if not path.parent.is_dir():
        raise ConfigError([f"cannot write {option} {name}: there is no folder {path.parent}"])
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError([f"cannot write {option} {name}: permission denied"])


def _add_doctor(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`ringjax doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine and installation",
        usage="ringjax doctor [--traceback]",
        description="Show versions, plugins, devices, memory and network names, and say what is wrong with them. The "
        "exit status is 0 if nothing is.",
    )
    _add_traceback(parser)
    parser.set_defaults(command=_doctor, overrides=[])


def _doctor(args: argparse.Namespace) -> int:
    """Print a diagnosis."""
    if args.overrides:
        raise ConfigError([f"command line: {word}: ringjax doctor takes no settings" for word in args.overrides])
    from ringjax.parallel.doctor import diagnose

    diagnosis = diagnose()
    _print(diagnosis)
    return 1 if diagnosis.problems else 0


def _launch(args: argparse.Namespace) -> int:
    """Check the settings once, then start the processes."""
    if args.procs < 1:
        raise ConfigError([f"command line: --procs {args.procs}: must be at least 1"])
    if set_here := [word for word in args.overrides if word.startswith("processes.")]:
        raise ConfigError(
            [f"command line: {word}: is set by ringjax launch itself; leave it out" for word in set_here]
        )
    load_config(args.config, [*args.overrides, f"processes.count={args.procs}", *_FIRST_PROCESS])
    from ringjax.parallel.launch import launch_local

    return launch_local([args.config, *args.overrides, *(["--traceback"] if args.traceback else [])], args.procs)


def _train(args: argparse.Namespace) -> int:
    """Load the settings, then train."""
    config = load_config(args.config, args.overrides)
    # Not at the top: wrong settings are reported before the libraries of training are loaded.
    from ringjax.training import run

    return run(config)


def _settings_help() -> str:
    """Every setting with its default, meaning and legal values, by section."""
    column = max(len(f"{key}={shown(setting.default)}") for key, setting in settings().items()) + 4
    lines = ["settings and their defaults:"]
    for section, summary in sections().items():
        lines += ["", f"  {section}: {summary[0].lower()}{summary[1:]}"]
        for key, setting in settings().items():
            if setting.section == section:
                start = f"    {key}={shown(setting.default)}".ljust(column + 2)
                meaning = f"{setting.description} [{setting.requirement}]"
                lines.append(
                    textwrap.fill(meaning, _HELP_WIDTH, initial_indent=start, subsequent_indent=" " * (column + 2))
                )
    return "\n".join(lines)
