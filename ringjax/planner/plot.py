"""Pictures of a plan: the ring's timeline, memory against context, step time against ring size. Needs matplotlib."""

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringjax.attention.layout import get_layout
from ringjax.config import Config, ConfigError, MeshConfig, UserError, check_config
from ringjax.planner.estimate import estimate
from ringjax.planner.machine import Machine
from ringjax.planner.memory import Memory, memory
from ringjax.planner.plan import Plan, show_mesh
from ringjax.planner.sizes import AXES, Sizes
from ringjax.planner.strategies import strategies
from ringjax.planner.timeline import Lap

ENDINGS = (".png", ".svg", ".pdf")
MOST_ROWS = 16  # ranks in the timeline


def draw(plan: Plan, vocab_size: int, documents: tuple[int, ...] | None, path: str) -> None:
    """Write the pictures of a plan into one file, whose ending says the format.

    Args:
      plan: of a run.
      vocab_size: V.
      documents: as in `make_plan`.
      path: as plan.png, plan.svg or plan.pdf.

    Raises:
      ConfigError: the file's ending is not that of pictures.
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), layout="constrained")
    figure.suptitle(f"{plan.machine.name}: {show_mesh(Sizes.of(plan.config, vocab_size).mesh)}")
    axes = figure.subplots(2, 2)
    laps = plan.estimate.windows[0]
    draw_lap(axes[0, 0], laps.forward, "forward lap of a layer")
    draw_lap(axes[0, 1], laps.backward, "backward lap of a layer")
    draw_memory(axes[1, 0], plan.config, vocab_size, plan.machine)
    draw_rings(axes[1, 1], plan.config, vocab_size, plan.machine, documents)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write --plot {path}: {error}") from error


def check_plot(path: str) -> None:
    """Whether pictures can be drawn, before there is anything to draw.

    Raises:
      ConfigError: the file's ending is not that of pictures.
      UserError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ConfigError([f"--plot {path}: the name must end in {', '.join(ENDINGS)}"])
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which is not installed: pip install 'ringjax[plot]'")


def bars(lap: Lap) -> list[tuple[int, str, float, float]]:
    """Rank, what it does, since when and for how long, in seconds: what the timeline shows."""
    found = []
    for rank in range(min(len(lap.start), MOST_ROWS)):
        for step in range(lap.start.shape[1]):
            start, compute = float(lap.start[rank, step]), float(lap.compute[rank, step])
            waited, merge = float(lap.waited[rank, step]), float(lap.merge[rank, step])
            found.append((rank, "idle", start - waited, waited))
            found.append((rank, "compute", start, compute))
            found.append((rank, "merge", start + compute, merge))
            if step + 1 < lap.start.shape[1]:
                found.append((rank, "transfer", start, lap.hop))
    return [bar for bar in found if bar[3] > 0]


def draw_lap(axis: Any, lap: Lap, title: str) -> None:
    """A Gantt chart: each rank's work above what it sends meanwhile."""
    colors = {"compute": "tab:blue", "merge": "tab:green", "idle": "tab:red", "transfer": "tab:orange"}
    for rank, kind, start, length in bars(lap):
        low, height = (rank - 0.4, 0.25) if kind == "transfer" else (rank - 0.15, 0.5)
        axis.broken_barh([(1e3 * start, 1e3 * length)], (low, height), color=colors[kind], edgecolor="white", lw=0.3)
    for kind, color in colors.items():
        axis.plot([], [], color=color, lw=6, label=kind)
    axis.set(title=title, xlabel="ms", ylabel="rank")
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.invert_yaxis()
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_memory(axis: Any, config: Config, vocab_size: int, machine: Machine) -> None:
    """What a device needs, by kind, as the context grows on the same mesh."""
    unit = get_layout(config.attention.layout).multiple(config.mesh.seq)
    lengths = [max(1, round(config.data.seq_len * 2.0**n / unit)) * unit for n in range(-4, 5)]
    found: list[Memory] = []
    for length in lengths:
        longer = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": length})})
        found.append(memory(longer, vocab_size, machine.chip.platform))
    kinds = [one.name for one in fields(Memory) if one.name != "host"]
    axis.stackplot(lengths, [[getattr(one, kind) / 2**30 for one in found] for kind in kinds], labels=kinds)
    axis.axhline(machine.chip.memory / 2**30, color="black", ls="--", label=machine.chip.name)
    axis.axvline(config.data.seq_len, color="gray", ls=":")
    axis.set(title="memory of a device", xlabel="context, tokens", ylabel="GiB", xscale="log")
    axis.legend(loc="upper left", fontsize="small")


def draw_rings(
    axis: Any, config: Config, vocab_size: int, machine: Machine, documents: tuple[int, ...] | None
) -> None:
    """Time of a sequence by strategy as the ring grows, on the same devices; fsdp has what the ring has not.

    Where fsdp has more devices than the batch has rows, the batch grows with it.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for ring, run in rings(config, machine):
        for strategy in strategies(Sizes.of(run, vocab_size)):
            step = estimate(run, vocab_size, machine, documents, strategy).seconds.total / run.data.batch
            if strategy.name != "hybrid":
                lines.setdefault(strategy.name, []).append((ring, step))
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(title="time of a sequence", xlabel="ring size (mesh.seq)", ylabel="s")
    axis.set_xscale("log", base=2)
    axis.legend()


def rings(config: Config, machine: Machine) -> list[tuple[int, Config]]:
    """The run with every ring size that its rules allow, on as many devices."""
    sizes = Sizes.of(config, 1).mesh
    shared = sizes["fsdp"] * sizes["seq"]
    found = []
    for ring in (n for n in range(1, shared + 1) if shared % n == 0):
        mesh = MeshConfig.model_validate(
            {**{axis: sizes[axis] for axis in AXES}, "fsdp": shared // ring, "seq": ring}
        )
        run = config.model_copy(update={"mesh": mesh})
        rows = mesh.data * mesh.fsdp * config.optim.accumulate * config.microbatches
        if config.data.batch % rows:
            batch = -(-config.data.batch // rows) * rows
            run = run.model_copy(update={"data": run.data.model_copy(update={"batch": batch})})
        if not check_config(run):
            found.append((ring, run))
    return found
