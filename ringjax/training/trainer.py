"""One run: what it is made of, and the loop over its steps."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ringjax.config import Config, ConfigError, UserError, check_config
from ringjax.data import Batch as HostBatch
from ringjax.data import Part, open_dataset
from ringjax.inference import generate
from ringjax.parallel import (
    check_host_memory,
    make_mesh,
    start_devices,
    start_processes,
)
from ringjax.training.checkpoint import Checkpoints
from ringjax.training.console import StepReport
from ringjax.training.faults import StopSignals
from ringjax.training.meter import Meter, device_memory
from ringjax.training.metrics import MetricsLog
from ringjax.training.programs import build_programs, choose_vocab_size
from ringjax.training.run_folder import RunFolder
from ringjax.training.state import initial_state
from ringjax.training.step import Batch, Metrics


class DivergedError(UserError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
      step: optimizer steps done.
      loss: nats per token, of this step's batch before its update.
      grad_norm: global norm of the gradient, before clipping.
      lr: learning rate of the update.
      tokens: tokens read since the start of training, padding included.
      report: the figures of the steps since the last report, if this step has one.
      eval_loss: held-out loss after the step, nats per token, if it was measured.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    report: StepReport | None = None
    eval_loss: float | None = None


class Trainer:
    """A run that can be stepped, from a program or a notebook. Use it as a context manager.

    Entering it makes everything ready: reads the corpus, starts the devices, claims the run folder, and starts the
    model or, if the folder holds a checkpoint, loads it. The mesh is the current one until the trainer is left.

    Args:
      config: a whole run.

    Attributes:
      config: the same.
      mesh: the devices.
      data: the corpus.
      vocab_size: rows of the embedding.
      state: parameters, optimizer state and steps done.
      start: steps that were done when the trainer was entered.
      done: steps that are done now.
      train_step: the compiled program of a step; None until the first one.
      notes: lines worth telling a person.

    Raises:
      ConfigError: settings that do not go together.
      UserError: what the run needs is not there: corpus, devices, run folder, a whole checkpoint.

    Example:
      >>> from ringjax.config import DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
      >>> config = Config(
      ...     run=RunConfig(dir="runs/example"),
      ...     mesh=MeshConfig(seq=2),
      ...     model=ModelConfig(layers=1, dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=64),
      ...     data=DataConfig(seq_len=64, batch=1, eval_batches=1),
      ...     optim=OptimConfig(warmup_steps=1),
      ...     train=TrainConfig(steps=2),
      ... )
      >>> with Trainer(config) as trainer:
      ...     [result.step for result in trainer.steps()]
      [1, 2]
    """

    def __init__(self, config: Config):
        self.config = config
        self.notes: list[str] = []
        self._meter = Meter()
        self._resources = ExitStack()

    def __enter__(self) -> "Trainer":
        if problems := check_config(self.config):
            raise ConfigError([str(problem) for problem in problems])
        try:
            self._prepare()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def steps(self, stop: StopSignals | None = None) -> Iterator[StepResult]:
        """Train to `train.steps`, yielding the result of every step.

        Results come one step late, while the accelerators are at work on the next one. Evaluations, metrics.jsonl,
        TensorBoard and checkpoints happen on the way, as the settings say, and the last state is saved. A caller
        that drops the iterator half-way gets no such last checkpoint.

        Args:
          stop: looked at before each step; when it asks for a stop, the state is saved and the iteration ends.

        Raises:
          DivergedError: the loss is not finite; nothing has been saved since it was.
        """
        train, late = self.config.train, None
        with closing(self.data.train.batches(self.done, self._part)) as batches:
            while self.done < train.steps and not self._stops(stop):
                if late is not None and self._at_once:
                    yield self._finish(*late)
                    late = None
                with self._meter.waiting():
                    batch = self._put(next(batches))
                if self.train_step is None:
                    self.train_step = self._compile(batch)
                    if self._stops(stop):  # compilation can take minutes
                        break
                self.state, metrics = self.train_step(self.state, batch, *self._wishes(stop))
                self.done += 1
                if late is not None:
                    yield self._finish(*late)
                late = (self.done, metrics)
                if _is_due(self.done, train.eval_every) or _is_due(self.done, train.save_every):
                    # The state must still be this step's when it is evaluated or saved.
                    yield self._finish(*late)
                    late = None
        if late is not None:
            yield self._finish(*late)
        if self.done > 0:
            self._checkpoints.save(self.done, self.state, wait=True)

    def evaluate(self) -> float:
        """Mean loss over the first `data.eval_batches` batches of held-out rows, in nats per token."""
        split = self.data.eval
        count = min(self.config.data.eval_batches, math.ceil(split.num_rows / self.config.data.batch))
        sums = [
            self._programs.evaluate(self.state.params, self._put(split.batch(i, self._part))) for i in range(count)
        ]
        loss, weight = np.sum(jax.device_get(sums), axis=0)
        return float(loss / weight)

    def sample(self, count: int, stop: StopSignals | None = None) -> str:
        """Text of `count` tokens that the model writes at the start of a document; less if `stop` asks for it."""
        tokenizer = self.data.tokenizer
        tokens = generate(
            nnx.merge(self._programs.definition, self.state.params),
            np.array([tokenizer.bos_id], np.int32),
            count,
            layout=self.config.attention.layout,
            num_ids=tokenizer.bos_id,
            seed=self.config.run.seed,
            stop=lambda: self._stops(stop),
        )
        return tokenizer.decode(tokens)

    def _prepare(self) -> None:
        """Find out what can go wrong before the first step; write nothing until the rest is known to be there."""
        config = self.config
        self.data = open_dataset(
            config.data, seed=config.run.seed, layout=config.attention.layout, ring=config.mesh.seq
        )
        self.vocab_size = choose_vocab_size(config, self.data.tokenizer.vocab_size)
        processes = start_processes(config)
        self.notes += start_devices(config.mesh, config.run.platform, processes)
        self.leads = jax.process_index() == 0
        self.mesh = make_mesh(config.mesh, config.run.platform)
        if config.train.offload:
            check_host_memory(self.mesh)
        # CPU devices work on the cores that this program runs on: nothing is won by running ahead of them, and the
        # time of each step is its own.
        self._at_once = self.mesh.devices.flat[0].platform == "cpu"
        self._set_compilation_cache()
        self._resources.enter_context(jax.set_mesh(self.mesh))
        self._programs = build_programs(config, self.vocab_size, self.mesh)

        self.folder = self._resources.enter_context(RunFolder(config.run.dir, self.leads))
        self.folder.adopt(config)
        self._checkpoints = self._resources.enter_context(Checkpoints(self.folder.checkpoints, config.train.keep))
        self._build()
        if config.optim.warmup_steps > config.train.steps:
            self.notes.append(
                f"optim.warmup_steps={config.optim.warmup_steps} is more than train.steps={config.train.steps}: "
                "the learning rate does not reach optim.lr"
            )
        self.done = self.start
        self._log = None
        if self.leads:
            self._log = self._resources.enter_context(
                MetricsLog(self.folder.metrics, self.folder.tensorboard, resume_step=self.start)
            )

    def _set_compilation_cache(self) -> None:
        """Use `run.compilation_cache`, unless programs that come from it could hang."""
        folder = self.config.run.compilation_cache
        if self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu":
            # When XLA (jax 0.10 to 0.12) reads a CPU program back, it forgets the order of its collectives: one
            # device then enters two at once, and the others wait for it for ever.
            if folder or jax.config.values["jax_compilation_cache_dir"]:
                self.notes.append("the compilation cache is off: CPU devices that share a program from it can hang")
            jax.config.update("jax_compilation_cache_dir", None)
        elif folder is not None:
            jax.config.update("jax_compilation_cache_dir", folder)

    def _build(self) -> None:
        """The state, new or from a checkpoint, and what surrounds it."""
        config, programs = self.config, self._programs
        self.schedule = programs.schedule
        self.train_step: jax.stages.Compiled | None = None
        self._place = programs.batch["tokens"].sharding
        self._part = _part(self._place, (config.data.batch, config.data.seq_len))
        self.agreed_to_stop = False  # processes of one run stop together
        if self._checkpoints.exist():
            self.start, self.state = self._checkpoints.restore(programs.state)
            self.notes.append(f"continuing from the checkpoint of step {self.start} in {self.folder.path}")
        else:
            shardings = jax.tree.map(lambda x: x.sharding, programs.state)
            start = partial(initial_state, config, self.vocab_size, programs.optimizer)
            self.start, self.state = 0, jax.jit(start, out_shardings=shardings)()

    def _compile(self, batch: Batch) -> jax.stages.Compiled:
        with self._meter.paused():
            return self._programs.step.lower(self.state, batch, *self._wishes(None)).compile()

    def _put(self, batch: HostBatch) -> Batch:
        """A batch on the devices, each with its own slots; the host has those of its own devices only."""
        shape = (self.config.data.batch, self.config.data.seq_len)

        def local(leaf: np.ndarray, index: Any) -> np.ndarray:
            wanted = (np.arange(size)[cut] for size, cut in zip(shape, index, strict=True))
            return leaf[np.ix_(*map(np.searchsorted, self._part, wanted))]

        return {
            name: jax.make_array_from_callback(shape, self._place, partial(local, leaf))
            for name, leaf in batch.items()
        }

    def _stops(self, stop: StopSignals | None) -> bool:
        """Whether to stop. Several processes stop when all have seen that one of them was asked to."""
        if jax.process_count() > 1:
            return self.agreed_to_stop
        return stop is not None and stop.requested is not None

    def _wishes(self, stop: StopSignals | None) -> tuple[jax.Array, ...]:
        """For runs of several processes: whether this one was asked to stop, on each of its devices."""
        if jax.process_count() == 1:
            return ()
        wish = np.float32(stop is not None and stop.requested is not None)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return (jax.make_array_from_callback((self.mesh.size,), sharding, lambda index: np.full(1, wish)),)

    def _finish(self, step: int, metrics: Metrics) -> StepResult:
        """Wait for a step, then do what is due after it."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.agreed_to_stop |= values.pop("stop", 0.0) > 0
        self._meter.step()
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self._checkpoints.wait()  # the message names the last one
            raise DivergedError(
                f"step {step}: loss is {values['loss']} and gradient norm {values['grad_norm']}; both must be "
                f"finite. The last checkpoint is that of step {max(self._checkpoints.steps(), default=0)}; lower "
                "optim.lr or optim.clip_norm, or raise optim.warmup_steps, in another run.dir"
            )
        train = self.config.train
        last = step == train.steps
        report = self._report(step, values) if last or step % train.log_every == 0 else None
        eval_loss = None
        with self._meter.paused():
            if last or _is_due(step, train.eval_every):
                eval_loss = self.evaluate()
                if self._log is not None:
                    self._log.eval(step, eval_loss=eval_loss)
            if _is_due(step, train.save_every) and not last:
                self._checkpoints.save(step, self.state)
            self._checkpoints.check()
        tokens = step * self.config.data.batch * self.config.data.seq_len
        return StepResult(step, values["loss"], values["grad_norm"], values["lr"], tokens, report, eval_loss)

    def _report(self, step: int, values: dict[str, float]) -> StepReport:
        """The figures since the last report, written to the metrics log."""
        assert self.train_step is not None
        pace = self._meter.take()
        tokens = self.config.data.batch * self.config.data.seq_len
        report = StepReport(
            loss=values["loss"],
            lr=values["lr"],
            grad_norm=values["grad_norm"],
            tokens_per_s=tokens / pace.step_s,
            tokens_per_s_device=tokens / pace.step_s / self.mesh.size,
            step_s=pace.step_s,
            data_wait_s=pace.data_wait_s,
            memory=device_memory(self.train_step),
            eta_s=pace.step_s * (self.config.train.steps - step),
        )
        if self._log is None:
            return report
        self._log.train(
            step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            tokens=step * tokens,
            tokens_per_s=report.tokens_per_s,
            step_s=report.step_s,
            data_wait_s=report.data_wait_s,
            memory=report.memory,
        )
        return report


def _part(sharding: NamedSharding, shape: tuple[int, int]) -> Part:
    """The places of a batch that this process's devices hold."""
    rows, slots = set(), set()
    for row, slot in filter(None, sharding.addressable_devices_indices_map(shape).values()):
        rows.update(range(shape[0])[row])
        slots.update(range(shape[1])[slot])
    return Part(np.array(sorted(rows)), np.array(sorted(slots)))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
