"""Tests of benchmarks/overlap.py and of what reads the programs for it."""

# ruff: noqa: E501 - XLA prints each instruction on one line.

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import overlap  # noqa: E402 - it is no package.
import scheduled_hlo  # noqa: E402
from scheduled_hlo import Collective  # noqa: E402

# The computations that the programs below call, as XLA prints them.
CALLED = """
HloModule jit_update, is_scheduled=true, entry_computation_layout={()->()}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%product (p.1: f32[8,8]) -> f32[8,8] {
  %p.1 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}
}

%scale (p.2: f32[8,8]) -> f32[8,8] {
  %p.2 = f32[8,8]{1,0} parameter(0)
  ROOT %add.2 = f32[8,8]{1,0} add(%p.2, %p.2)
}
"""
GPU_BODY = """
  %g = f32[8,8]{1,0} parameter(0)
  %all-reduce-start.3 = f32[8,8]{1,0} all-reduce-start(%g), channel_id=1, to_apply=%sum
  %bitcast.4 = f32[64]{0} bitcast(%g)
  %fusion.5 = f32[8,8]{1,0} fusion(%g), kind=kCustom, calls=%product
  %gemm.6 = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%g, %g), custom_call_target="__cublas$gemm"
  %fusion.7 = f32[8,8]{1,0} fusion(%g), kind=kLoop, calls=%scale
  %all-reduce-done.3 = f32[8,8]{1,0} all-reduce-done(%all-reduce-start.3)
  %fusion.8 = f32[8,8]{1,0} fusion(%g), kind=kLoop, calls=%product
"""


def _read(text: str) -> list[Collective]:
  return scheduled_hlo.Program(text).collectives()


def _entry(lines: str) -> str:
  return f"ENTRY %main (g: f32[8,8]) -> f32[8,8] {{{lines}}}\n"


def test_what_is_between_start_and_done_of_a_gpu_is_counted() -> None:
  assert _read(CALLED + _entry(GPU_BODY)) == [
    Collective("all-reduce", "f32", 256, 1, True, 3, 2)
  ]


def test_a_synchronous_collective_has_nothing_between() -> None:
  lines = """
  %g = bf16[8,8]{1,0} parameter(0)
  %c = s32[]{:T(128)} parameter(1)
  %all-reduce.1 = (bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[]{:T(128)}) all-reduce(%g, %c), to_apply=%sum
  ROOT %fusion.5 = f32[8,8]{1,0} fusion(%g), kind=kLoop, calls=%product
"""
  assert _read(CALLED + _entry(lines)) == [
    Collective("all-reduce", "bf16, s32", 8 * 8 * 2 + 4, 1, False, 0, 0)
  ]


def test_starts_and_dones_of_libtpu_belong_together_by_their_chain() -> None:
  inner = "".join(
    f"""
%{name} (q: f32[8,8]) -> f32[8,8] {{
  %q.{name} = f32[8,8]{{1,0:T(8,128)}} parameter(0)
  %all-reduce.{name} = f32[8,{width}]{{1,0:T(8,128)}} all-reduce(%q.{name}), to_apply=%sum, frontend_attributes={{chain_id="{chain}"}}
  ROOT %dot.{name} = f32[8,8]{{1,0}} convolution(%q.{name}, %q.{name}), dim_labels=bf_io->bf
}}
"""
    for name, chain, width in (
      *(("a", 0, 2), ("b", 1, 4)),
      *(("carry", 0, 2), ("c", 0, 2), ("d", 1, 4)),
    )
  )
  lines = """
  %g = f32[8,8]{1,0} parameter(0)
  %async-collective-start = (f32[8,2]{1,0}, u32[]{:S(2)}) fusion(%g), kind=kCustom, calls=%a
  %async-collective-start.1 = (f32[8,4]{1,0}, u32[]{:S(2)}) fusion(%g), kind=kCustom, calls=%b
  %fusion.1 = (f32[8,8]{1,0}, f32[8,2]{1,0}) fusion(%g), kind=kOutput, calls=%carry
  %async-collective-done.7 = f32[8,4]{1,0} fusion(%g), kind=kCustom, calls=%d
  %fusion.2 = f32[8,8]{1,0} fusion(%g), kind=kLoop, calls=%scale
  %async-collective-done.9 = f32[8,2]{1,0} fusion(%g), kind=kCustom, calls=%c
"""
  assert _read(CALLED + inner + _entry(lines)) == [
    Collective("all-reduce", "f32", 8 * 4 * 4, 1, True, 1, 1),
    Collective("all-reduce", "f32", 8 * 2 * 4, 1, True, 2, 1),
  ]


@pytest.mark.parametrize(
  "trips",
  [
    'backend_config={"known_trip_count":{"n":"12"}}',  # of GPUs
    "metadata={}",  # libtpu leaves it to the condition
  ],
)
def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs(
  trips: str,
) -> None:
  loop = f"""
%condition (state: f32[8,8]) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(12), metadata={{}}
  ROOT %lt = pred[] compare(%bound, %bound), direction=LT
}}

%body (g: f32[8,8]) -> f32[8,8] {{{GPU_BODY}}}
"""
  lines = f"""
  %g = f32[8,8]{{1,0}} parameter(0)
  %all-reduce-start.1 = s32[2]{{0}} all-reduce-start(%g), to_apply=%sum
  %while.1 = f32[8,8]{{1,0}} while(%g), condition=%condition, body=%body, {trips}
  %all-reduce-done.1 = s32[2]{{0}} all-reduce-done(%all-reduce-start.1)
"""
  assert _read(CALLED + loop + _entry(lines)) == [
    Collective("all-reduce", "f32", 256, 12, True, 3, 2),
    # The loop is between: 4 operations an iteration, 3 with products.
    Collective("all-reduce", "s32", 8, 1, True, 12 * 4, 12 * 3),
  ]


def test_what_zero_needs_is_read_whole_and_through_calls() -> None:
  called = """
%scattered (q: f32[64]) -> f32[8] {
  %q = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0} reduce-scatter(%q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%sum
}

%command_buffer (r: f32[64]) -> f32[64] {
  %r = f32[64]{0} parameter(0)
  %fusion.5 = f32[8,8]{1,0} fusion(%r), kind=kCustom, calls=%product
  %all-gather-start.1 = (f32[8]{0}, f32[64]{0}) all-gather-start(%r), replica_groups=[1,8]<=[8]
}
"""
  lines = """
  %g = f32[64]{0} parameter(0)
  %reduce-scatter-start = ((f32[64]{0}), f32[8]{0}) async-start(%g), calls=%scattered
  %call = f32[64]{0} call(%g), to_apply=%command_buffer
  %reduce-scatter-done = f32[8]{0} async-done(%reduce-scatter-start)
  ROOT %all-gather-done.1 = f32[64]{0} all-gather-done(%all-gather-start.1)
  %reduce-scatter.2 = bf16[4]{0} reduce-scatter(%g), replica_groups=[2,16]<=[32], to_apply=%sum
"""
  assert _read(CALLED + called + _entry(lines)) == [
    Collective("reduce-scatter", "f32", 256, 1, True, 1, 1),
    Collective("all-gather", "f32", 256, 1, True, 0, 0),
    Collective("reduce-scatter", "bf16", 4 * 2 * 16, 1, False, 0, 0),
  ]


def test_the_report_adds_up_what_is_hidden() -> None:
  row = Collective("all-reduce", "f32", 1_000_000, 3, True, 5, 2)
  other = row._replace(num_bytes=500_000, times=1, num_matmuls=0)
  text = overlap.report([row, row, other])
  assert "| 2 | all-reduce | f32 | 1.000 | 3 | yes | 5 | 2 |" in text
  assert "all-reduce: 6.5 MB an update, 6.0 MB of them with matrix" in text


def test_options_of_the_compiler_are_the_flags_that_distlm_sets() -> None:
  options = overlap.compiler_options("gpu", "distlm", ["xla_more=7"])
  assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
  assert options["xla_more"] == "7"
  assert not any(name.startswith("-") for name in options)
  assert overlap.compiler_options("tpu", "none") == {}


def test_without_the_compiler_one_line_says_what_to_install(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  missing = ("no_such_package.plugin", "pip install it")
  monkeypatch.setitem(overlap.PACKAGES, "tpu", missing)
  monkeypatch.setattr(sys, "argv", ["overlap.py", "--platform=tpu"])
  with pytest.raises(SystemExit, match=r"is not installed: pip install it$"):
    overlap.main()
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_gradients_of_layers_are_summed_during_the_backward_pass(
  platform: str,
) -> None:
  if missing := overlap.what_is_missing(platform):
    pytest.skip(missing)
  output = subprocess.run(
    [sys.executable, BENCHMARKS / "overlap.py", f"--platform={platform}"],
    env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  found = re.search(r"([\d.]+) MB of parameters", output)
  sums = re.search(r"all-reduce: ([\d.]+) MB an update, ([\d.]+) MB", output)
  assert found and sums, output
  total, hidden = map(float, sums.groups())
  assert total == pytest.approx(float(found[1]), abs=0.1)
  # All but the embeddings.
  assert hidden > 0.8 * total, output
