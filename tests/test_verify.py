"""Tests that `distlm verify` finds what is wrong, where it is, and no more."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import planted_faults
import pytest
import tiny_run
from verify_run import (
  ALL,
  ALONE,
  DEVICES,
  FAULTY,
  FEW,
  FLAGS,
  PARAMETER,
  PARTS,
  Report,
  compare_few,
  differing,
  open_config,
  read,
  run_job,
)

from distlm import cli, parallel
from distlm.verify import checks, report

Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", autouse=True)
def _caching(config: Path) -> Iterator[None]:
  """Lets runs share compiled programs; a fault changes the program's key."""
  with tiny_run.compiling_once(
    config.parent / "compiled",
    # Most of the time goes into compiling, the least into computing.
    jax_disable_most_optimizations=True,
  ):
    yield


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets the command use the eight devices that this process has already."""
  monkeypatch.setattr(cli, "_VERIFIED_FAKE_DEVICES", 1)


@pytest.fixture
def command(
  config: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Report]]:
  """Returns a function that runs the command: exit code, and what it shows."""

  def command(*more: str) -> tuple[int, Report]:
    capsys.readouterr()
    code = tiny_run.run_here(["verify", f"--config={config}", *FLAGS, *more])
    output, errors = capsys.readouterr()
    return code, read(output, tiny_run.check_one_line(errors) if errors else "")

  return command


@pytest.fixture
def verify(
  config: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Report]:
  """Returns a function that compares a few layouts, and nothing else."""
  return functools.partial(compare_few, config, monkeypatch)


def test_all_layouts_of_the_right_code_are_equal(
  command: Callable[..., tuple[int, Report]],
) -> None:
  code, found = command()
  assert (code, found.error) == (0, "")
  assert found.verdicts == dict.fromkeys(ALL, "equal")
  assert found.findings == {
    "dropout": "17 masks, of all devices, parts and 2 steps, differ",
    # The text has 19,000 tokens to train on and 1,000 to validate on.
    "data": "an epoch has each of 2,375 sequences and 18,999 targets once, an"
    " evaluation each of 999",
  }
  assert found.output.startswith("4 steps of 32 sequences of 8 tokens")
  assert re.search(r"^reference, no pmap +5\.\d+ ", found.output, re.MULTILINE)
  assert found.output.endswith("all layouts are equal, within 1e-05 relative\n")


@pytest.mark.parametrize(
  ("fault", "layouts", "says"),
  [
    # The first step whose accumulation steps or devices count unequally.
    (
      planted_faults.mean_of_means_over_accumulation_steps,
      (PARTS,),
      rf"step 1 differs by .* in grad_norm; .* is {PARAMETER}",
    ),
    (
      planted_faults.mean_of_means_over_devices,
      (DEVICES,),
      rf"step 1 differs by .* in grad_norm; .* is {PARAMETER}",
    ),
    (
      planted_faults.clipped_before_the_sum_over_devices,
      (DEVICES,),
      rf"step 1 differs by .* in grad_norm; .* is {PARAMETER}",
    ),
    # Clipping hides in the first parameters that all gradients are too large.
    (
      planted_faults.gradient_summed_twice,
      (DEVICES,),
      r"step 1 differs by 7\.0e\+00 in grad_norm; no parameter differs yet,.*",
    ),
    (
      planted_faults.tokens_not_summed_over_devices,
      (DEVICES,),
      r"step 1 differs by .* in loss; no parameter differs yet,.*",
    ),
    (
      planted_faults.last_accumulation_step_left_out,
      (PARTS,),
      rf"step 1 differs by .* in loss; .* is {PARAMETER}",
    ),
    (
      planted_faults.replicas_drift_apart,
      (DEVICES,),
      r"replicas differ from each other after step 1",
    ),
    (
      planted_faults.same_rows_on_two_devices,
      (DEVICES,),
      rf"step 1 differs by .* in loss; .* is {PARAMETER}",
    ),
    (
      planted_faults.padding_counted_as_tokens,
      (ALONE, DEVICES, PARTS),
      r"step 1 differs by .* in loss; .*",
    ),
    (
      planted_faults.mean_of_means_in_evaluation,
      (DEVICES,),
      r"an evaluation of 783 tokens, of 783, differs by .* in its loss",
    ),
    (
      planted_faults.partial_evaluation_batch_dropped_by_the_run,
      (ALONE, DEVICES, PARTS),
      r"an evaluation of \d+ tokens, of 783, differs by .* in its loss",
    ),
  ],
)
def test_layouts_with_a_fault_differ_and_others_do_not(
  fault: Fault,
  layouts: tuple[str, ...],
  says: str,
  verify: Callable[..., Report],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  fault(monkeypatch)
  found = verify()
  assert differing(found) == layouts
  assert re.fullmatch(f"layout {re.escape(layouts[0])}: {says}", found.error)


@pytest.mark.parametrize(
  "fault",
  [
    planted_faults.mean_of_means_in_evaluation,
    planted_faults.partial_evaluation_batch_dropped_by_the_run,
  ],
)
def test_faults_of_evaluation_show_where_its_first_batches_are_full(
  fault: Fault, verify: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
  fault(monkeypatch)
  found = verify(("data.validation_fraction", "0.3"), steps=1)
  assert DEVICES in differing(found)
  assert "an evaluation of" in found.error


def test_many_steps_without_clipping_blow_no_rounding_up(
  verify: Callable[..., Report],
) -> None:
  found = verify(("optimizer.clip_norm", "0.0"), steps=30)
  assert (differing(found), found.error) == ((), "")


def test_one_device_is_compared_too(config: Path) -> None:
  args = ["verify", f"--config={config}", *FLAGS, "--devices=1"]
  found = read(tiny_run.run(args, tiny_run.environment(None)), "")
  assert found.verdicts == {
    f"1 device(s) x {parts}": "equal" for parts in (1, 2, 4)
  }


def test_the_first_parameter_that_differs_is_named(
  verify: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
  planted_faults.embeddings_not_summed_over_devices(monkeypatch)
  found = verify(("optimizer.clip_norm", "0.0"), steps=1)
  assert differing(found) == (DEVICES,)
  assert found.error.endswith(" is transformer/tokens.embeddings")


@pytest.mark.parametrize(
  ("fault", "says"),
  [
    (
      planted_faults.key_reused_on_every_device,
      "device 1 in part 0 of step 1 has the mask of device 0 in part 0 of"
      " step 1",
    ),
    (
      planted_faults.one_constant_key,
      "device 1 in part 0 of step 1 has the mask of device 0 in part 0 of"
      " step 1",
    ),
    (
      planted_faults.key_of_the_device_alone,
      "device 0 in part 0 of step 2 has the mask of device 0 in part 0 of"
      " step 1",
    ),
    (
      planted_faults.key_reused_in_every_accumulation_step,
      "device 0 in part 1 of step 1 has the mask of device 0 in part 0 of"
      " step 1",
    ),
  ],
)
def test_equal_masks_of_dropout_are_found(
  fault: Fault, says: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  fault(monkeypatch)
  parallel.repair_jaxline()
  settings, store = open_config(config)
  settings = report._plain(settings, list(FEW), 1)
  assert checks.check_masks(settings, store) == ("", says)


@pytest.mark.parametrize(
  ("fault", "says"),
  [
    (
      planted_faults.ragged_sequence_dropped,
      r"sequence \d+ comes (2|0) times in epoch 1",
    ),
    (
      planted_faults.epoch_goes_on_with_the_order_of_the_last,
      r"sequence \d+ comes (0|[2-9]) times in epoch 2",
    ),
    (
      planted_faults.sequence_repeated_in_an_epoch,
      r"sequence \d+ comes (0|[2-9]) times in epoch 1",
    ),
    (
      planted_faults.partial_evaluation_batch_dropped_by_the_loader,
      r"an evaluation has 768 targets that sum to \d+, its text 999 that sum"
      r" to \d+",
    ),
  ],
)
def test_data_left_out_or_repeated_is_found(
  fault: Fault, says: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  fault(monkeypatch)
  settings, store = open_config(config)
  settings = report._plain(settings, list(FEW), 1)
  finding, problem = checks.check_data(settings, store)
  assert finding == ""
  assert re.fullmatch(says, problem)


@pytest.mark.parametrize(
  ("fault", "layouts", "place"),
  [
    (
      planted_faults.mean_of_means_over_accumulation_steps,
      (PARTS,),
      f"layout {PARTS}: step 1",
    ),
    (planted_faults.key_reused_on_every_device, (), "dropout: device 1"),
    (planted_faults.sequence_repeated_in_an_epoch, (), "data: sequence"),
  ],
)
def test_the_command_fails_and_says_where_in_one_line(
  fault: Fault,
  layouts: tuple[str, ...],
  place: str,
  command: Callable[..., tuple[int, Report]],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  fault(monkeypatch)
  monkeypatch.setattr(report, "_layouts", lambda: list(FEW))
  code, found = command()
  assert code == 1
  assert found.error.startswith(place)
  assert differing(found) == layouts
  # The rest is looked at too, and found right.
  kind = place.split(":")[0]
  for name, sign in (("dropout", "17 masks"), ("data", "an epoch has each")):
    assert found.findings[name].startswith(sign) == (name != kind)
  assert "all layouts are equal" not in found.output


def test_keys_shared_on_purpose_are_not_compared(
  command: Callable[..., tuple[int, Report]], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(report, "_layouts", lambda: list(FEW))
  mode = "unique_host_same_device"
  code, found = command(f"--config.random_mode_train={mode}")
  assert (code, found.error) == (0, "")
  assert differing(found) == ()
  assert found.findings["dropout"] == (
    f"not compared, since random_mode_train={mode} shares keys"
  )


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--steps=0"], "--steps=0: it must be 1 or more"),
    (["--steps=two"], "argument --steps: invalid int value: 'two'"),
    (["--config.model.wdith=3"], "model.wdith"),
    (
      ["--config.data.sequence_length=700"],
      "data.global_batch_size=32: the training split",
    ),
    (
      ["--config.data.validation_fraction=0.0001"],
      "its validation split has 2 of 20000 tokens",
    ),
  ],
)
def test_bad_input_is_answered_in_one_line(
  flags: list[str],
  says: str,
  command: Callable[..., tuple[int, Report]],
) -> None:
  code, found = command(*flags)
  assert (code, found.output) == (2, "")
  assert says in found.error


def test_layouts_of_two_processes_are_equal(config: Path) -> None:
  ends = run_job(config, "-m", "distlm")
  assert [code for code, *_ in ends] == [0, 0], ends
  found = read(ends[0][1])
  assert found.verdicts == {
    f"2 x 2 device(s) x {parts}": "equal" for parts in (1, 2, 4)
  }
  assert found.findings["dropout"].startswith("9 masks")


def test_two_processes_with_the_same_rows_are_found(config: Path) -> None:
  ends = run_job(config, "-c", FAULTY, str(Path(__file__).parent))
  assert [code for code, *_ in ends] == [1, 1], ends
  for _, output, error in ends:
    assert set(read(output).verdicts.values()) == {"DIFFERS"}
    assert tiny_run.check_one_line(error).startswith(
      "layout 2 x 2 device(s) x 1: step 1 differs by "
    )
