"""A whole run for a person: the table at the start, progress, and what came of it."""

import jax

from ringjax.config import Config
from ringjax.models import count_parameters
from ringjax.parallel import ProcessesError
from ringjax.planner import short_form
from ringjax.training.console import Console, format_count, plural
from ringjax.training.faults import EXIT_AGAIN, StopSignals
from ringjax.training.trainer import Trainer


def run(config: Config) -> int:
    """Train as the settings say, or continue the run in `run.dir`, and tell a person about it.

    Args:
      config: a whole run.

    Returns:
      Exit status: 0 when the last step is done; 75 when SIGTERM and 130 when Ctrl-C ended it early, after saving.

    Raises:
      UserError: something the run needs is wrong or missing.
    """
    with StopSignals() as stop, Trainer(config) as trainer:
        console = Console() if trainer.leads else Console.silent()
        console.table(_summary(trainer))
        for note in trainer.notes:
            console.line(note)
        try:
            _train(trainer, console, stop)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            raise ProcessesError(
                f"the processes lost each other after step {trainer.done} ({str(error).splitlines()[0]}); look at "
                "the logs of the others. The same command, in all processes, continues from the last checkpoint"
            ) from error
        folder = trainer.folder
        if (stop.requested or trainer.agreed_to_stop) and trainer.done < config.train.steps:
            done, steps = trainer.done, config.train.steps
            where = f"after step {done} of {steps}, saved in {folder.path}" if done else "before the first step"
            console.line(f"stopped by {stop.requested or 'another process'} {where}; the same command continues")
            return stop.exit_status or EXIT_AGAIN
        if count := config.train.sample_tokens:
            console.line(f"\na sample of {count} tokens:")
            console.line(trainer.sample(count, stop) + "\n")
        console.line(f"metrics      {folder.metrics}")
        console.line(f"tensorboard  {folder.tensorboard}  (tensorboard --logdir {folder.tensorboard})")
        console.line(f"checkpoints  {folder.checkpoints}")
        console.line(f"settings     {folder.config}")
    return 0


def _train(trainer: Trainer, console: Console, stop: StopSignals) -> None:
    """Run the steps, showing each report and evaluation."""
    steps, unit = trainer.config.train.steps, trainer.data.tokenizer.unit
    if trainer.start >= steps:
        console.line(f"all {steps} steps are done; raise train.steps to train on")
        console.evaluation(trainer.start, trainer.evaluate(), f"nats/{unit}")
        return
    with console.progress(steps, trainer.start) as progress:
        for result in trainer.steps(stop):
            if result.report is not None:
                progress.report(result.step, result.report)
            else:
                progress.advance(result.step)
            if result.eval_loss is not None:
                console.evaluation(result.step, result.eval_loss, f"nats/{unit}")


def _summary(trainer: Trainer) -> list[tuple[str, str]]:
    """What is trained on what, in a few lines."""
    config, model, data = trainer.config, trainer.config.model, trainer.data
    parameters = count_parameters(trainer.state.params)
    axes = ", ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items() if size > 1) or "one device"
    local = config.data.seq_len // config.mesh.seq
    schedule = trainer.schedule
    pipeline = (
        f"{schedule.stages} stages, {schedule.rounds * schedule.stages} groups of "
        f"{plural(model.layers // (schedule.rounds * schedule.stages), 'layer')}, "
        f"{schedule.microbatches} microbatches: {schedule.bubble:.0%} of the time is bubble "
        f"({schedule.stages - 1} of {schedule.ticks} ticks)"
    )
    return [
        (
            "model",
            f"{plural(model.layers, 'layer')}, dim {model.dim}, {plural(model.heads, 'head')} over "
            f"{plural(model.kv_heads, 'key/value head')}",
        ),
        ("parameters", f"{format_count(parameters)}, {config.train.precision} computation"),
        ("mesh", f"{axes} ({trainer.mesh.devices.flat[0].device_kind})"),
        (
            "sequence",
            f"{config.data.seq_len:,} tokens, {local:,} on each device of the ring, {config.attention.layout}",
        ),
        *([("pipeline", pipeline)] if schedule.stages > 1 else []),
        (
            "batch",
            f"{plural(config.data.batch, 'sequence')}, "
            f"{format_count(config.data.batch * config.data.seq_len)} tokens a step",
        ),
        ("plan", short_form(config, trainer.vocab_size, trainer.mesh.devices.flat[0])),
        ("data", f"{config.data.source}: {_size(data.train)} to train on, {_size(data.eval)} held out"),
        ("run", f"{trainer.start} of {plural(config.train.steps, 'step')} done, in {trainer.folder.path}"),
    ]


def _size(split) -> str:
    return f"{format_count(split.num_tokens)} tokens in {plural(split.num_documents, 'document')}"
