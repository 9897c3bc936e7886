"""The settings of a run: every name, type, range and default, in one place.

The tree is frozen. A component receives only the section it needs. Rules that tie several settings together
live in `check.py`; YAML files are read by `load.py`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
# YAML has lists, and what never changes is a tuple: hence not strict.
Windows = Annotated[tuple[Count | None, ...], Field(strict=False, min_length=1)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A group of settings. Unknown names and wrong types are refused, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """Where the run lives and what it runs on."""

    dir: str = Field(default="runs/default", min_length=1, description="run folder: everything the run writes")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seeds the weights, the order of the data, dropout and the sample"
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = Field(default="auto", description="kind of device to run on")
    compilation_cache: str | None = Field(
        default=None,
        description="folder of compiled programs, reused by later runs (not by CPU meshes of several devices); "
        "null = compile every time",
    )


class MeshConfig(Section):
    """Devices along each mesh axis; their product is the number of devices used."""

    stage: Count = Field(default=1, description="pipeline stages: each holds its share of the layers")
    data: Count = Field(default=1, description="replicas of the parameters, each with its share of the batch")
    fsdp: Count = Field(default=1, description="as data, and parameters and optimizer state are sharded over it")
    seq: Count = Field(default=1, description="the ring: the sequence is sharded over it")
    tensor: Count = Field(default=1, description="heads, MLP and vocabulary are sharded over it")
    ring_may_cross: bool = Field(
        default=False, description="let seq and tensor cross hosts or slices where one of them would be enough"
    )


class ProcessesConfig(Section):
    """Processes of the run, each with its share of the devices; all null = one process."""

    detect: bool = Field(
        default=False, description="let jax find the processes that SLURM, Open MPI, Kubernetes or Cloud TPU started"
    )
    count: Count | None = Field(default=None, description="processes in all")
    index: NonNegative | None = Field(default=None, description="which of them this is, from 0")
    coordinator: str | None = Field(default=None, min_length=3, description="host:port of process 0")
    timeout_s: Count = Field(default=300, description="seconds until a process that has not come up is given up")


class AttentionConfig(Section):
    """How attention runs. None of these changes what is computed."""

    layout: Literal["contiguous", "zigzag", "striped"] = Field(
        default="zigzag", description="which token sits on which device of the ring"
    )
    strategy: Literal["ring"] = Field(default="ring", description="how keys and values meet the queries")
    kernel: Literal["auto", "xla", "cpu", "tpu", "splash", "gpu", "cudnn"] = Field(
        default="auto", description="attention of one block against one block; auto = the best for the devices"
    )


class ModelConfig(Section):
    """The decoder."""

    layers: Count = Field(default=4, description="transformer blocks")
    dim: Count = Field(default=256, description="width of the residual stream")
    heads: Count = Field(default=4, description="query heads")
    kv_heads: Count = Field(default=2, description="key/value heads; heads must be a multiple")
    head_dim: Count = Field(default=64, description="size of one head; even, since RoPE rotates pairs")
    mlp_dim: Count = Field(default=704, description="hidden width of the SwiGLU MLP")
    vocab_size: Count | None = Field(default=None, description="rows of the embedding; null = the tokenizer's")
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(default=1e-6, gt=0, description="added to the mean square inside RMSNorm")
    tied_embeddings: bool = Field(default=True, description="the output head is the embedding, transposed")
    window: Count | Windows | None = Field(
        default=None,
        description="tokens that one sees, itself and those right before it; null = all; a list is a pattern that "
        "goes through the layers again and again, as [1024, 1024, null]",
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the attention weights that is dropped in training"
    )
    mlp_chunk: Count | None = Field(
        default=None, description="tokens of each device whose MLP is computed at one time; null = all"
    )
    loss_chunk: Count = Field(default=512, description="tokens of each device whose logits exist at one time")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The pattern of windows, of at least one layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,)


class DataConfig(Section):
    """What the model reads."""

    source: Literal["stdlib", "text"] = Field(
        default="stdlib", description="stdlib = the sources of this Python's standard library; text = files"
    )
    path: str | None = Field(default=None, description="for source text: a UTF-8 file, or a folder of them")
    pattern: str = Field(default="**/*.txt", min_length=1, description="which files of a folder are documents")
    tokenizer: Literal["bytes"] = Field(default="bytes", description="how text becomes tokens")
    seq_len: Count = Field(default=4096, description="tokens of context, over the whole ring")
    batch: Count = Field(default=4, description="sequences per optimizer step, over all devices")
    eval_fraction: float = Field(default=0.05, gt=0, lt=1, description="share of the documents held out")
    eval_batches: Count = Field(default=4, description="batches of held-out sequences in one evaluation")


class OptimConfig(Section):
    """How parameters move."""

    name: Literal["adamw"] = Field(default="adamw", description="optimizer")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    warmup_steps: NonNegative = Field(default=20, description="steps of linear warm-up; cosine decay follows")
    final_lr_ratio: Unit = Field(default=0.1, description="learning rate at the last step, as a share of lr")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay of matrices; norms have none")
    b1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    b2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    clip_norm: float | None = Field(default=1.0, gt=0, description="largest global gradient norm; null = no clipping")
    accumulate: Count = Field(default=1, description="parts a batch is cut into, one after another")


class TrainConfig(Section):
    """The loop."""

    steps: Count = Field(default=200, description="optimizer steps in all")
    log_every: Count = Field(default=10, description="steps between reports")
    eval_every: NonNegative = Field(default=50, description="steps between evaluations; 0 = only at the end")
    save_every: NonNegative = Field(default=100, description="steps between checkpoints; 0 = only at the end")
    keep: Count = Field(default=2, description="newest checkpoints that are kept")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="type of the computation; weights and optimizer state stay float32"
    )
    remat: Literal["none", "attention", "block", "full"] = Field(
        default="block",
        description="what the backward pass computes again: none = nothing; attention = all but what goes into and "
        "comes out of attention; block = all but attention's result; full = that too, with one more lap of the ring",
    )
    offload: bool = Field(
        default=False,
        description="the inputs of the blocks, which the backward pass begins with, wait for it in the host's memory "
        "(GPU and TPU)",
    )
    scan_layers: bool = Field(
        default=True, description="equal layers are one loop of the program; false = a longer program"
    )
    microbatches: Count | None = Field(
        default=None,
        description="parts of a batch that follow each other through the stages; null = as many as stages",
    )
    rounds: Count = Field(
        default=1,
        description="groups of layers on each stage: the more, the shorter the bubble (circular schedule); a run "
        "keeps its number on every mesh",
    )
    sample_tokens: NonNegative = Field(default=200, description="tokens of text generated at the end; 0 = none")


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig()
    processes: ProcessesConfig = ProcessesConfig()
    attention: AttentionConfig = AttentionConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    @property
    def microbatches(self) -> int:
        """Parts of a batch that follow each other through the stages."""
        return self.train.microbatches or self.mesh.stage
