"""Tests of distlm.checkpoint: what is saved is what is restored."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from attribute_experiment import Toy, open_checkpoints, save_step

from distlm import parallel
from distlm.errors import RunError, UsageError


def _names(directory: Path) -> list[str]:
  return sorted(path.name for path in directory.iterdir())


@pytest.fixture(autouse=True)
def _repaired() -> None:
  parallel.repair_jaxline()


@pytest.mark.parametrize("attribute", Toy(1).listed())
def test_each_attribute_is_restored_into_a_fresh_object(
  saved_toy: Path, attribute: str
) -> None:
  restored = Toy(0)
  open_checkpoints(saved_toy, restored).restore("latest")
  expected = getattr(Toy(1), attribute)
  found = getattr(restored, attribute)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for want, have in zip(
    jax.tree.leaves(expected), jax.tree.leaves(found), strict=True
  ):
    if isinstance(want, (jax.Array, np.ndarray, np.generic)):
      assert have.dtype == want.dtype
      np.testing.assert_array_equal(np.asarray(have), np.asarray(want))
    else:
      assert (type(have), have) == (type(want), want)
  if attribute in Toy.CHECKPOINT_ATTRS:
    for leaf in jax.tree.leaves(found):
      assert len(leaf.sharding.device_set) == jax.local_device_count()


@pytest.fixture(scope="module")
def saved_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a directory with a checkpoint of step 5."""
  parallel.repair_jaxline()
  directory = tmp_path_factory.mktemp("toy")
  checkpointer = open_checkpoints(directory, Toy(1))
  state = checkpointer.get_experiment_state("latest")
  state.train_step_rng = parallel.replicate(jax.random.PRNGKey(9))
  save_step(checkpointer, 5, "latest")
  checkpointer.close()
  return directory


def test_step_key_and_settings_are_restored(saved_toy: Path) -> None:
  checkpointer = open_checkpoints(saved_toy, Toy(0))
  assert checkpointer.can_be_restored("latest")
  assert checkpointer.restore_path("latest") == f"{saved_toy}/latest/5"
  checkpointer.restore("latest")
  state = checkpointer.get_experiment_state("latest")
  assert state.global_step == 5
  np.testing.assert_array_equal(
    state.train_step_rng, parallel.replicate(jax.random.PRNGKey(9))
  )
  assert checkpointer.read_scalars("latest") == {"global_step": 5}


def test_nothing_is_there_before_the_firstsave_step(tmp_path: Path) -> None:
  checkpointer = open_checkpoints(tmp_path / "none", Toy(0))
  assert not checkpointer.can_be_restored("latest")
  assert checkpointer.restore_path("best") is None
  checkpointer.wait_for_checkpointing_to_finish()
  checkpointer.close()
  assert not (tmp_path / "none").exists()


RESTORE = """
import sys
from pathlib import Path
from distlm import parallel
parallel.start(int(sys.argv[2]))
parallel.repair_jaxline()
import numpy as np, jax
from attribute_experiment import Toy, open_checkpoints
toy = Toy(0)
checkpointer = open_checkpoints(Path(sys.argv[1]), toy)
checkpointer.restore("latest")
for have, want in zip(
  jax.tree.leaves(toy._params),
  jax.tree.leaves(Toy(1)._params),
  strict=True,
):
  assert have.shape[0] == jax.local_device_count() == int(sys.argv[2])
  np.testing.assert_array_equal(np.asarray(have), np.asarray(want))
print("equal")
"""


def test_another_number_of_devices_can_restore(saved_toy: Path) -> None:
  env = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
  env["PYTHONPATH"] = os.pathsep.join(sys.path)
  result = subprocess.run(
    [sys.executable, "-c", RESTORE, str(saved_toy), "3"],
    env=env,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (result.returncode, result.stdout) == (0, "equal\n"), result.stderr


def test_what_is_saved_is_a_copy(tmp_path: Path) -> None:
  toy = Toy(1)
  checkpointer = open_checkpoints(tmp_path, toy)
  checkpointer.get_experiment_state("latest").global_step = 1
  checkpointer.save("latest")
  # All at once, while Orbax may be writing.
  donate = parallel.pmap(
    lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0
  )
  old = toy._params
  toy._params = donate(old)
  assert old.second[0].is_deleted()
  # A view of it that was kept would bar the donation.
  array = toy._host["array"]
  jax.jit(lambda x: x + 1, donate_argnums=0)(array)
  assert array.is_deleted()
  toy._host["int64"][:] = 0
  toy._numbers["w"][:] = 0
  toy._position["step"] = 99
  toy._position["seen"].append("later")
  checkpointer.wait_for_checkpointing_to_finish()
  restored = Toy(0)
  open_checkpoints(tmp_path, restored).restore("latest")
  jax.tree.map(np.testing.assert_array_equal, restored._params, Toy(1)._params)
  np.testing.assert_array_equal(restored._numbers["w"], Toy(1)._numbers["w"])
  for name in ("int64", "array"):
    np.testing.assert_array_equal(restored._host[name], Toy(1)._host[name])
  assert restored._position == Toy(1)._position


def test_the_newest_stay_and_the_best_apart_from_them(tmp_path: Path) -> None:
  toy = Toy(1)
  checkpointer = open_checkpoints(tmp_path, toy, keep=2)
  best = checkpointer.get_experiment_state("best")
  best.experiment_module = toy
  for step in (1, 2, 3, 4):
    if step in (1, 2):
      best.best_eval_metric_value = np.float32(0.5 - 0.25 * step)
      best.best_model_eval_metric = "loss"
      toy._text = f"best at {step}"
      save_step(checkpointer, step, "best")
    save_step(checkpointer, step, "latest")
  checkpointer.close()
  assert _names(tmp_path / "latest") == ["3", "4"]
  assert _names(tmp_path / "best") == ["2"]
  restored = Toy(0)
  open_checkpoints(tmp_path, restored, "best").restore("best")
  assert restored._text == "best at 2"
  assert open_checkpoints(tmp_path, restored, "best").read_scalars("best") == {
    "global_step": 2,
    "best_eval_metric_value": 0.0,
    "best_model_eval_metric": "loss",
  }


def test_a_better_model_of_an_earlier_step_becomes_the_best(
  tmp_path: Path,
) -> None:
  # As in a run that resumed on other devices: its figures differ a little.
  toy = Toy(1)
  for step in (30, 20):
    checkpointer = open_checkpoints(tmp_path, toy, "best")
    toy._text = f"best at {step}"
    save_step(checkpointer, step, "best")
    checkpointer.close()
  restored = Toy(0)
  open_checkpoints(tmp_path, restored, "best").restore("best")
  assert restored._text == "best at 20"


def test_saving_a_step_twice_keeps_the_first(tmp_path: Path) -> None:
  toy = Toy(1)
  for text in ("first", "second"):
    checkpointer = open_checkpoints(tmp_path, toy)
    toy._text = text
    checkpointer.get_experiment_state("latest").global_step = 1
    checkpointer.save("latest")
    checkpointer.save("latest")  # While the first may be on its way.
    save_step(checkpointer, 1, "latest")
    checkpointer.close()
  restored = Toy(0)
  open_checkpoints(tmp_path, restored).restore("latest")
  assert restored._text == "first"


def test_a_later_save_of_another_process_is_seen(tmp_path: Path) -> None:
  reader = open_checkpoints(tmp_path, Toy(0))
  assert not reader.can_be_restored("latest")
  writer = open_checkpoints(tmp_path, Toy(1))
  for step in (1, 2):
    save_step(writer, step, "latest")
    assert reader.restore_path("latest") == str(tmp_path / f"latest/{step}")
    reader.restore("latest")
    assert reader.get_experiment_state("latest").global_step == step


class Renamed(Toy):
  """A Toy with one parameter more and another one less."""

  def __init__(self) -> None:
    super().__init__(0)
    layers = self._params.first
    layers["layer_0"]["int64"] = layers["layer_0"].pop("int32")


@pytest.mark.parametrize(
  ("make", "name", "shapes"),
  [
    (lambda: Toy(0, width=4), r"params\.\S*layer_0\.bfloat16", ("3", "4")),
    (Renamed, r"params\.\S*layer_0\.int32", ("3", "none")),
  ],
)
def test_other_arrays_are_refused_by_name(
  saved_toy: Path, make: Any, name: str, shapes: tuple[str, str]
) -> None:
  with pytest.raises(UsageError) as error:
    open_checkpoints(saved_toy, make()).restore("latest")
  message = str(error.value)
  assert str(saved_toy / "latest" / "5") in message
  saved, wanted = (s if s == "none" else rf"\({s},\)" for s in shapes)
  pattern = rf"{name} is of shape {saved}, but this experiment has {wanted};"
  assert re.search(pattern, message), message


@pytest.mark.parametrize(
  "name", ["7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-123", "7", "x"]
)
def test_what_is_not_whole_is_ignored(
  tmp_path: Path, saved_toy: Path, name: str
) -> None:
  directory = tmp_path / "checkpoints"
  shutil.copytree(saved_toy, directory)
  (directory / "latest" / name / "arrays").mkdir(parents=True)
  checkpointer = open_checkpoints(directory, Toy(0))
  assert checkpointer.restore_path("latest") == str(directory / "latest" / "5")
  checkpointer.restore("latest")
  # And nothing keeps the run from saving on.
  for step in (6, 7, 8):
    save_step(checkpointer, step, "latest")
    assert checkpointer.series("latest").newest() == step
  open_checkpoints(directory, Toy(0)).restore("latest")


def test_a_save_that_fails_is_raised(tmp_path: Path) -> None:
  checkpointer = open_checkpoints(tmp_path, Toy(1))
  save_step(checkpointer, 1, "latest")
  shutil.rmtree(tmp_path / "latest")
  (tmp_path / "latest").write_text("in the way")
  with pytest.raises(RunError, match="could not be written"):
    save_step(checkpointer, 2, "latest")


def test_the_error_of_the_writing_thread_is_raised(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  checkpointer = open_checkpoints(tmp_path, Toy(1))
  real_rename = os.rename

  def fail(source: Any, target: Any, **options: Any) -> None:
    if str(target).endswith("latest/2"):
      raise OSError(28, "No space left on device")
    real_rename(source, target, **options)

  save_step(checkpointer, 1, "latest")
  monkeypatch.setattr(os, "rename", fail)
  with pytest.raises(RunError, match="No space left on device"):
    save_step(checkpointer, 2, "latest")
  monkeypatch.undo()
  assert open_checkpoints(tmp_path, Toy(0)).series("latest").newest() == 1


def test_nothing_is_pickled(
  saved_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  for path in saved_toy.rglob("*"):
    assert path.suffix not in (".pkl", ".pickle", ".npz")
    # The opcodes that begin every pickle since protocol 2.
    if path.is_file():
      assert path.read_bytes()[:2] not in (
        b"\x80\x02",
        b"\x80\x04",
        b"\x80\x05",
      )

  def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("unpickled")

  for module in ("pickle", "_pickle"):
    for name in ("load", "loads", "Unpickler"):
      monkeypatch.setattr(f"{module}.{name}", refuse)
  open_checkpoints(saved_toy, Toy(0)).restore("latest")
