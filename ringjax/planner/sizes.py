"""What one device has of a run: layers, rows, tokens, heads and weights."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ringjax.config import Config

AXES = ("stage", "data", "fsdp", "seq", "tensor")
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Sizes:
    """Of one device, in use.

    Attributes:
      mesh: devices along each axis.
      wire: bytes of an activation, and of a weight in use.
      own_layers: layers whose weights are this device's.
      ticks: of the pipeline in one part of a batch; those in the bubble work as well.
      runs: of a layer in all these ticks.
      windows: layers of each window, of the whole model.
      rows: b, of a microbatch.
      tokens: L.
      loss_tokens: whose loss is computed here.
      loss_chunks: into which they are cut.
      mlp_tokens: of a microbatch, filled up to whole chunks if the MLP runs in chunks.
      dim: M.
      heads: H.
      kv_heads: K.
      head_dim: D.
      mlp_dim: F.
      layer_matrices: elements of a layer's matrices.
      layer_norms: elements of its norms.
      table: elements of the embedding.
      head: elements of the output head, which may be the embedding.
      tied: whether it is.
      vocab: V.
      layers: N.
    """

    mesh: dict[str, int]
    wire: int
    own_layers: int
    ticks: int
    runs: int
    windows: dict[int | None, int]
    rows: int
    tokens: int
    loss_tokens: int
    loss_chunks: int
    mlp_tokens: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    layer_matrices: int
    layer_norms: int
    table: int
    head: int
    tied: bool
    vocab: int
    layers: int

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "Sizes":
        """The sizes of a run that `check_config` accepts."""
        model, mesh = config.model, {axis: getattr(config.mesh, axis) for axis in AXES}
        tensor, stages = mesh["tensor"], mesh["stage"]
        heads, kv_heads, mlp_dim = model.heads // tensor, model.kv_heads // tensor, model.mlp_dim // tensor
        own = model.layers // stages
        each = config.data.batch // (mesh["data"] * mesh["fsdp"] * config.optim.accumulate)
        tokens = config.data.seq_len // mesh["seq"]
        ticks = config.microbatches * config.train.rounds + stages - 1
        rows, loss_tokens = each // config.microbatches, each // stages * tokens
        matrices = 2 * (heads + kv_heads) * model.head_dim * model.dim + 3 * model.dim * mlp_dim
        pattern = model.windows
        return cls(
            mesh=mesh,
            wire=BYTES[config.train.precision],
            own_layers=own,
            ticks=ticks,
            runs=ticks * own // config.train.rounds,
            windows=dict(Counter(pattern[layer % len(pattern)] for layer in range(model.layers))),
            rows=rows,
            tokens=tokens,
            loss_tokens=loss_tokens,
            loss_chunks=ceil(loss_tokens / model.loss_chunk),
            mlp_tokens=_whole_chunks(rows * tokens, model.mlp_chunk),
            dim=model.dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=model.head_dim,
            mlp_dim=mlp_dim,
            layer_matrices=matrices,
            layer_norms=2 * model.dim,
            table=vocab_size // tensor * model.dim,
            head=vocab_size // tensor * model.dim,
            tied=model.tied_embeddings,
            vocab=vocab_size // tensor,
            layers=model.layers,
        )

    def runs_of(self, of_layers: int) -> int:
        """What all runs of layers on this device have together, from what all layers of the model have."""
        share = Fraction(of_layers * self.runs, self.layers)
        assert share.denominator == 1, "every stage has as many layers of each kind"
        return share.numerator

    @property
    def stored_parameters(self) -> int:
        """Parameters that this device keeps, their gradients and moments likewise."""
        pieces = self.mesh["fsdp"] * self.mesh["seq"]
        ends = self.table + (0 if self.tied else self.head) + self.dim
        return (self.own_layers * (self.layer_matrices + self.layer_norms) + ends) // pieces

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        tensor = self.mesh["tensor"]
        ends = (self.table + (0 if self.tied else self.head)) * tensor + self.dim
        return self.layers * (self.layer_matrices * tensor + self.layer_norms) + ends


def _whole_chunks(tokens: int, chunk: int | None) -> int:
    """Tokens when all chunks are filled: as many of one size as there must be."""
    if chunk is None:
        return tokens
    count = ceil(tokens / chunk)
    return count * ceil(tokens / count)
