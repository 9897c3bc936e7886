"""Block attention on NVIDIA GPUs: three Triton kernels written in Pallas.

jax 0.12 still has Pallas's Triton backend and compiles these kernels, but warns that a later version will drop it.

Forward and dq own a tile of queries and walk over tiles of keys; dk and dv own a tile of keys and walk over the
queries of the heads that share it. The forward starts from what has been seen before and writes over it, so that
merging costs no pass of its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels.base import BlockKernel, Gradients, Relation, Slots
from ringjax.attention.kernels.gpu_visits import Extent, Visits, all_clear, comparing, visits, width_of
from ringjax.attention.kernels.varying import varying_alike
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial


class Tiling(NamedTuple):
    """How one kernel is cut: queries and keys of a tile, warps of a program, stages of its pipeline of loads."""

    q: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class GpuKernel(BlockKernel):
    """Fused attention for NVIDIA GPUs of compute capability 8.0 or later.

    Attributes:
      q_tile: queries of a tile in all kernels, a power of two; None = `tiling`'s choice, like the next three.
      k_tile: keys of a tile, likewise.
      num_warps: warps of 32 threads that run one program.
      num_stages: tiles that are being loaded while one is at work, and that one.
      interpret: run on any backend, slowly, without compiling for a GPU. Tiles may then have any size.
    """

    q_tile: int | None = None
    k_tile: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    interpret: bool = False
    name = "gpu"

    def __post_init__(self) -> None:
        for name in ("q_tile", "k_tile"):
            tile = getattr(self, name)
            if tile is not None and (tile < 1 or (not self.interpret and (tile < 16 or tile & (tile - 1)))):
                raise ValueError(f"GpuKernel.{name} must be a power of two and at least 16, got {tile}")

    @property
    def apart(self) -> bool:
        return True

    @property
    def check_vma(self) -> bool:
        return not self.interpret  # jax's interpreter of kernels loses track

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        from ringjax.attention.kernels.gpu_bodies import forward

        call = _Call(self, "forward", q, kv, relation, rule, heads, q_slots, k_slots)
        return Partial(*call.run(forward, tuple(before), (q,), (kv,)))

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        from ringjax.attention.kernels.gpu_bodies import backward_kv, backward_q

        rest = q, kv, relation, rule, heads, q_slots, k_slots
        of_q = q, dout, lse, delta
        dq, dkv = before
        if dq is not None:
            (dq,) = _Call(self, "dq", *rest).run(backward_q, (dq,), of_q, (kv,))
        if dkv is not None:
            (dkv,) = _Call(self, "dkv", *rest).run(backward_kv, (dkv,), of_q, (kv,))
        return Gradients(dq, dkv)

    def tiling(self, what: str, dtype: Any, dim: int) -> Tiling:
        """How the kernel `what` ("forward", "dq" or "dkv") is cut for heads of `dim`, the larger of D and Dv."""
        chosen = _tiling(what, np.dtype(dtype).itemsize, dim)
        given = (self.q_tile, self.k_tile, self.num_warps, self.num_stages)
        return Tiling(*(a if a is not None else b for a, b in zip(given, chosen, strict=True)))


def _tiling(what: str, itemsize: int, dim: int) -> Tiling:
    """Tiles whose accumulators stay in registers and whose operands fit an A100's shared memory (163 KB).

    Chosen by what the compiler reports for compute capability 8.0, 9.0 and 10.0, not by time: eight warps, since a
    tile of 128 queries has 16,384 sums at D = 128, 64 registers a thread; for dk and dv, which have two accumulators,
    more keys than queries, since each tile of queries is loaded once for each tile of keys. float32 has no tensor
    cores (TF32 would round to 10 bits): its products are written out element by element, and larger tiles spill
    kilobytes of registers.
    """
    if itemsize > 2:
        return Tiling(32, 32, 8, 1) if dim <= 128 else Tiling(16, 16, 8, 1)
    if dim <= 128:
        return {"forward": Tiling(128, 64, 8, 3), "dq": Tiling(128, 64, 8, 2), "dkv": Tiling(32, 128, 8, 2)}[what]
    if dim <= 256:
        return {"forward": Tiling(64, 64, 8, 2), "dq": Tiling(32, 64, 8, 1), "dkv": Tiling(64, 32, 8, 1)}[what]
    return Tiling(16, 32, 8, 1) if what != "dkv" else Tiling(32, 16, 8, 1)


class _Call:
    """One kernel over the arrays of a block pair."""

    def __init__(
        self,
        kernel: GpuKernel,
        what: str,
        q: jax.Array,
        kv: jax.Array,
        relation: Relation,
        rule: ScoreRule,
        heads: Heads,
        q_slots: Slots,
        k_slots: Slots,
    ) -> None:
        from ringjax.attention.kernels.gpu_bodies import Case

        self.batch, self.kv_heads, group, self.q_len, dim = q.shape
        self.k_len, value_dim = kv.shape[2], kv.shape[3] - dim
        self.kernel, self.what, self.by_keys = kernel, what, what == "dkv"
        self.tiling = kernel.tiling(what, q.dtype, max(dim, value_dim))
        of_q = Extent(q_slots.size, _tile(q_slots.size, self.tiling.q))
        of_k = Extent(k_slots.size, _tile(k_slots.size, self.tiling.k))
        if not rule.needs_positions and comparing(relation).is_full:
            relation = _without_positions(relation)
        edges = not all_clear(relation, of_k)
        self.case = Case(
            comparing(relation),
            relation.lead.stride,
            rule,
            of_q,
            of_k,
            dim,
            value_dim,
            group,
            edges,
            self.by_keys,
        )
        ways = visits(relation, of_q, of_k, self.by_keys) if edges else Visits(None)  # type: ignore[arg-type]
        numbers = [jnp.asarray(x, jnp.int32) for x in (relation.lead.by, q_slots.start, k_slots.start)]
        self.sight = (ways, relation.q_tokens, relation.k_tokens, jnp.stack(numbers), heads)

    def run(self, body: Any, before: tuple, of_q: tuple, of_k: tuple) -> list[jax.Array]:
        """Run `body(case, sight, before, of_q, of_k, results)` in all programs.

        Args:
          body: gets references.
          before: float32 arrays like the results, which take their place; a program reads its tile before it writes.
            They are of keys for dk and dv, otherwise of queries.
          of_q: [B, K, G, Lq, ...] each.
          of_k: [B, K, Lk, ...] each.
        """
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        from ringjax.attention.kernels.gpu_bodies import Sight

        case = self.case
        own = case.k if self.by_keys else case.q

        def kernel(before: tuple, of_q: tuple, of_k: tuple, sight: tuple, *results: Any) -> None:
            body(case, Sight(*sight), before, of_q, of_k, results)

        operands, axes = varying_alike((before, of_q, of_k, self.sight))
        of_results = self._of_k if self.by_keys else self._of_q
        specs = [
            jax.tree.map(block, x) for block, x in zip((of_results, self._of_q, self._of_k), operands, strict=False)
        ]
        return pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32, manual_axis_type=axes) for x in before],
            grid=(own.tiles, 1 if self.by_keys else case.group, self.kv_heads, self.batch),
            in_specs=(*specs, self._sight_blocks(operands[3])),
            out_specs=[of_results(x) for x in before],
            input_output_aliases={i: i for i in range(len(before))},
            compiler_params=triton.CompilerParams(num_warps=self.tiling.warps, num_stages=self.tiling.stages),
            interpret=self.kernel.interpret,
            name=f"attention_{self.what}",
        )(*operands)

    def _of_q(self, x: Any) -> Any:
        """What a program gets of an array of queries: those of its sequence and key/value head.

        Rows are filled up to whole tiles and head dims to a power of two, beyond the array; loads leave that out.
        """
        return self._block(self.case.group, self.q_len + self.case.q.over, *map(width_of, x.shape[4:]))

    def _of_k(self, x: Any) -> Any:
        """Likewise, of an array of keys and values side by side."""
        return self._block(self.k_len + self.case.k.over, self.case.dim + width_of(self.case.value_dim))

    def _block(self, *sizes: int) -> Any:
        from jax.experimental import pallas as pl

        return pl.BlockSpec((None, None, *sizes), lambda i, g, n, b: (b, n, *(0 for _ in sizes)))

    def _sight_blocks(self, sight: tuple) -> tuple:
        from jax.experimental import pallas as pl

        ways, q_tokens, k_tokens, numbers, heads = sight

        def of_sequence(x: jax.Array, *block: int | None, own: bool = False) -> Any:
            several = x.shape[0] > 1

            def index(i: Any, g: Any, n: Any, b: Any) -> tuple:
                return (b if several else 0, i, 0) if own else (b if several else 0, 0)

            return pl.BlockSpec((None, *block), index)

        def of_tokens(tokens: Tokens, extent: Extent) -> Any:
            return jax.tree.map(lambda x: of_sequence(x, extent.filled), tokens)

        return (
            jax.tree.map(lambda x: of_sequence(x, None, x.shape[-1], own=True), ways),
            of_tokens(q_tokens, self.case.q),
            of_tokens(k_tokens, self.case.k),
            pl.BlockSpec(numbers.shape, lambda i, g, n, b: (0,)),
            jax.tree.map(lambda x: pl.BlockSpec((None, None, x.shape[-1]), lambda i, g, n, b: (b, n, 0)), heads),
        )


def _without_positions(relation: Relation) -> Relation:
    q, k = relation.q_tokens, relation.k_tokens
    return relation._replace(q_tokens=q._replace(positions=None), k_tokens=k._replace(positions=None))


def _tile(length: int, most: int) -> int:
    """Tiles of at most `most`, and no larger than a length needs; 16 is the least that tensor cores multiply."""
    return min(most, max(16, 1 << (length - 1).bit_length()))
