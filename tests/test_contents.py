"""Tests of distlm.contents: what is in a checkpoint."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from attribute_experiment import Toy, open_checkpoints, save_step
from checkpoint_commands import delete, fails, save, show, truncate

from distlm import checksums, parallel
from distlm.errors import RunError


@pytest.fixture(autouse=True)
def _repaired() -> None:
  parallel.repair_jaxline()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns the workdir of a language model after 2 steps."""
  config = tiny_run.write_inputs(tmp_path_factory.mktemp("inputs"))
  workdir = config.parent / "trained"
  args = (
    "--config.accumulation_steps=1",
    "--config.optimizer.warmup_steps=1",
    "--config.model.num_layers=1",
    "--jaxline_mode=train",
    "--config.checkpoint.interval=1",
    "--config.training_steps=2",
  )
  command = tiny_run.arguments("train", config, workdir, *args)
  assert tiny_run.run_here(command) == 0
  return workdir


def test_verify_reads_the_arrays_of_a_real_run(
  trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert show(capsys, "verify", trained) == ("latest  1  ok\nlatest  2  ok\n")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("float64", np.array([0.0, np.nan])),
    ("array", jnp.array([-jnp.inf, 0.0], jnp.bfloat16)),
    ("scalar", float("inf")),
  ],
)
def test_verify_names_the_first_array_that_is_not_finite(
  tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
  toy = Toy(1)
  toy._host[name] = value
  path = save(tmp_path, 1, toy)
  assert show(capsys, "list", tmp_path).endswith("ok\n")
  message = fails(RunError, "verify", tmp_path)
  assert message.startswith(f"checkpoint {path}: host.{name} is not finite (1")


def metadata_is(text: str) -> Callable[[Path], None]:
  return lambda path: bytes_written(path / "metadata" / "metadata", text)


def bytes_written(path: Path, text: str) -> None:
  assert path.exists()
  path.write_text(text)


OBJECTS = {"state": {}, "attributes": {}, "config": {}}


@pytest.mark.parametrize(
  ("corrupt", "says"),
  [
    (delete, "it cannot be read"),
    (truncate, "it cannot be read"),
    (metadata_is("{"), "it cannot be read (JSONDecodeError"),
    (metadata_is("[" * 100_000), "it cannot be read (RecursionError"),
    (metadata_is("[]"), "its metadata has no object state"),
    (metadata_is("{}"), "its metadata has no object state"),
    (
      metadata_is(json.dumps({**OBJECTS, "attributes": None})),
      "its metadata has no object attributes",
    ),
    (
      metadata_is(json.dumps({**OBJECTS, "config": []})),
      "its metadata has no object config",
    ),
    (
      lambda path: bytes_written(path / "arrays" / "_METADATA", "[]"),
      "it cannot be read (AttributeError",
    ),
    (lambda path: shutil.rmtree(path / "arrays"), "it cannot be read"),
  ],
)
def test_what_cannot_be_read_is_one_line_though_checksums_are_right(
  tmp_path: Path,
  capsys: pytest.CaptureFixture[str],
  corrupt: Callable[[Path], None],
  says: str,
) -> None:
  path = save(tmp_path, 10, Toy(1))
  corrupt(path)
  checksums.write_checksums(path)
  assert show(capsys, "list", path).endswith("ok\n")
  for command in ("verify", "inspect"):
    message = fails(RunError, command, path)
    assert message.startswith(f"checkpoint {path}: {says}")
    assert message.count("; move it away to go on from") == 1
  fails(RunError, "diff", path, path)


def test_inspect_shows_what_a_checkpoint_holds(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  toy = Toy(1)
  # Deeper ones, before and after it, are not the parameters.
  toy._host["params"] = np.ones(5)
  toy._stateless = parallel.replicate({"params": jnp.ones(4)})
  checkpointer = open_checkpoints(tmp_path / "checkpoints", toy, "best")
  state = checkpointer.get_experiment_state("best")
  state.best_eval_metric_value = np.float32(0.25)
  save_step(checkpointer, 9, "best")
  checkpointer.close()
  path = tmp_path / "checkpoints" / "best" / "9"
  text = show(capsys, "inspect", path)
  title, *lines = text[: text.index("\narray ")].splitlines()
  assert title == f"checkpoint {path}"
  rows = dict(line.strip().split(maxsplit=1) for line in lines)
  assert re.fullmatch(r"0\.0\d MiB", rows.pop("size"))
  assert datetime.datetime.fromisoformat(rows.pop("saved"))
  assert rows == {
    "series": "best",
    "step": "9",
    # Seven dtypes of 3, w of 2 x 3, b, and the second of the pair.
    "parameters": "29",
    "state.global_step": "9",
    "state.best_eval_metric_value": "0.25",
    "attributes.position": '{"step": 3, "seen": [1, 2.5, "a", null, true]}',
    "attributes.pair": '[5, [1, ["b", null]]]',
    "attributes.text": json.dumps("naïve ☃"),
  }


def test_inspect_shows_the_arrays(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  save(tmp_path, 1, Toy(1))
  lines = show(capsys, "inspect", tmp_path).splitlines()
  header = next(i for i, line in enumerate(lines) if line.startswith("array "))
  table = [re.split("  +", line) for line in lines[header:]]
  assert table[0] == ["array", "dtype", "shape", "bytes"]
  assert ["params.first.layer_0.bfloat16", "bfloat16", "[3]", "6"] in table
  assert ["params.first.layer_1.0.w", "float32", "[2, 3]", "24"] in table
  assert ["host.long", "int64", "[]", "8"] in table
  assert ["numbers.x", "float64", "[]", "8"] in table
  assert ["train_step_rng", "uint32", "[2]", "8"] in table
  sizes = [int(row[-1]) for row in table[1:-1]]
  assert table[-1] == ["total of 25", f"{sum(sizes)}"]
  assert len(sizes) == 25
  # Names to the left, numbers to the right.
  assert len({len(line) for line in lines[header:]}) == 1


def test_inspect_counts_the_parameters_of_a_real_run(
  trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  text = show(capsys, "inspect", trained)
  held = tiny_run.checkpoint(trained)
  arrays = {k: v for k, v in held.items() if isinstance(v, np.ndarray)}
  num_params = sum(
    array.size for name, array in arrays.items() if "['params']" in name
  )
  assert num_params > 10_000
  assert re.search(rf"^  parameters +{num_params:,}$", text, re.M)
  num_bytes = sum(array.nbytes for array in arrays.values())
  assert re.search(rf"^total of {len(arrays)} +{num_bytes:,}$", text, re.M)
  assert re.search(r"^train_state\.params\.\S+ +float32 +\[\d+", text, re.M)
  assert re.search(r"^  attributes.data_position +\{", text, re.M)


class Bare(Toy):
  """Has no array but an empty dict and the key of the steps."""

  CHECKPOINT_ATTRS: ClassVar = {}
  NON_BROADCAST_CHECKPOINT_ATTRS: ClassVar = {"_empty": "empty"}


def test_inspect_shows_where_there_is_next_to_nothing(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  parallel.repair_jaxline()
  save(tmp_path, 1, Bare(1))
  text = show(capsys, "inspect", tmp_path)
  assert "parameters" not in text and "attributes" not in text
  assert re.search(r"\ntrain_step_rng .*\ntotal of 1 +8\n$", text)


def test_names_cannot_command_the_terminal(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  parallel.repair_jaxline()
  toy = Toy(1)
  toy._host["\x1b[2J\nok"] = np.array([np.nan])
  toy._position["\x1b[1m"] = 1
  save(tmp_path, 1, toy)
  text = show(capsys, "inspect", tmp_path)
  assert text.replace("\n", "").isprintable()
  assert r"host.\x1b[2J\nok " in text
  line = r"host.\x1b[2J ok is not finite"
  assert f": {line} (1" in fails(RunError, "verify", tmp_path)
  assert capsys.readouterr().out == f"latest  1  {line}\n"


def test_the_steps_of_a_real_run_differ(
  trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  fails(RunError, "diff", trained)
  lines = capsys.readouterr().out.splitlines()
  assert re.match(r"train_state\.\S+: .* by at most", lines[2])
  assert lines[-2] == "state.global_step: 1 in the first, 2 in the second"
  assert lines[-1].startswith("attributes.data_position.")
