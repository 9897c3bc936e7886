"""Hops in a schedule: which of them a kernel runs under."""

import pytest

from ringjax.parallel import Hop, covered, read_hops

HOP = 'metadata={op_name="jit(f)/while/body/ring_hop/ppermute"}'
BACK = 'metadata={op_name="jit(f)/transpose(jvp())/ring_hop/ppermute"}'
KERNEL = 'metadata={op_name="jit(f)/block_attention/pallas_call"}'
PAIRS = "source_target_pairs={{0,1},{1,0}}"


def program(*entry: str, trips: int = 3) -> str:
    """A loop that sends and works, a fusion that holds a product, and what the program begins with."""
    lines = "\n".join(f"  {line}" for line in entry)
    return f"""HloModule jit_f, is_scheduled=true

%inner (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %dot.1 = f32[4]{{0}} dot(%x, %x), {KERNEL}
}}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %v = f32[4]{{0}} get-tuple-element(%p), index=1
  %send = (f32[4]{{0}}, f32[4]{{0}}) collective-permute-start(%v), {PAIRS}, {HOP}
  %work = f32[4]{{0}} fusion(%v), kind=kOutput, calls=%inner
  %got = f32[4]{{0}} collective-permute-done(%send), {HOP}
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%v, %got)
}}

%condition (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %w = (s32[], f32[4]{{0}}) while(%x), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
{lines}
}}
"""


def test_a_hop_in_a_loop_counts_once_a_trip_and_is_covered_by_what_a_fusion_holds():
    assert read_hops(program()) == [Hop("f32", (4,), backward=False, covered=True, times=3)]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (f"%k = f32[4]{{0}} custom-call(%x), custom_call_target=\"tpu_custom_call\", {KERNEL}", True),
        ("%k = f32[4]{0} fusion(%x), kind=kOutput, calls=%inner", True),
        (f"%k = f32[4]{{0}} copy(%x), {KERNEL}", False),  # named so, and no work
        ('%k = f32[4]{0} custom-call(%x), custom_call_target="x", metadata={op_name="jit(f)/mlp/dot"}', False),
    ],
)  # fmt: skip
def test_what_covers(between, expected):
    text = program(
        f"%s.1 = (bf16[2,4]{{0}}, bf16[2,4]{{0}}) collective-permute-start(%x), {PAIRS}, {BACK}",
        between,
        "%d.1 = bf16[2,4]{0} collective-permute-done(%s.1)",
    )
    assert Hop("bf16", (2, 4), backward=True, covered=expected, times=1) in read_hops(text)


def test_a_kernel_outside_of_the_window_covers_nothing():
    kernel = f'%k = f32[4]{{0}} custom-call(%x), custom_call_target="tpu_custom_call", {KERNEL}'
    text = program(
        kernel,
        f"%s.1 = (f32[4]{{0}}, f32[4]{{0}}) collective-permute-start(%x), {PAIRS}, {HOP}",
        "%d.1 = f32[4]{0} collective-permute-done(%s.1)",
        kernel.replace("%k", "%k2"),
        f"%s.2 = s32[4]{{0}} collective-permute(%x), {PAIRS}, {HOP}",
    )
    hops = read_hops(text)
    assert covered(hops) == (3, 5)
    assert [hop.is_of_tokens for hop in hops] == [False, False, True]


def test_messages_that_leave_together_are_each_their_own():
    arrays = "(f32[4]{0}, s32[8]{0})"
    text = program(
        f"%s.1 = ({arrays}, {arrays}) collective-permute-start(%x, %y), {PAIRS}, {HOP}",
        "%d.1 = (f32[4]{0}, s32[8]{0}) collective-permute-done(%s.1)",
    )
    assert [(hop.dtype, hop.shape) for hop in read_hops(text)[1:]] == [("f32", (4,)), ("s32", (8,))]


def test_other_messages_are_no_hops():
    stage = 'metadata={op_name="jit(f)/roll/ppermute"}'
    text = program(f"%s.1 = f32[4]{{0}} collective-permute(%x), {PAIRS}, {stage}")
    assert len(read_hops(text)) == 1
