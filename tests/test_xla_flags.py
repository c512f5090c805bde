"""Tests that only flags are set that XLA knows and the user leaves open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlm import xla_flags
from distlm.errors import UsageError

HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
GPU_FLAGS = xla_flags.recommended("gpu")["XLA_FLAGS"]
TPU_FLAGS = xla_flags.recommended("tpu")["LIBTPU_INIT_ARGS"]
# Sets the flags as a program does, then makes JAX's devices.
PROGRAM = """
import os, sys
from pathlib import Path
from distlm import xla_flags
if "nothing" not in sys.argv:
  print(xla_flags.apply(os.environ, "gpu", [Path(p) for p in sys.argv[1:]]))
assert "jax" not in sys.modules
import jax
print(jax.devices())
"""


def names(flags: list[str]) -> list[str]:
  return [flag[2:].partition("=")[0] for flag in flags]


def library(path: Path, flags: list[str]) -> Path:
  """Writes what has the names of flags as a shared library has them."""
  content = b"\0".join(name.encode() for name in names(flags))
  path.write_bytes(b"\x7fELF" + bytes(100) + content + bytes(100))
  return path


@pytest.fixture
def knowing_all(tmp_path: Path) -> list[Path]:
  return [library(tmp_path / "xla.so", [*GPU_FLAGS, *TPU_FLAGS])]


def installed_jaxlib() -> Path:
  [path] = xla_flags.find_libraries("gpu", {})[:1]
  assert path.parent.name == "jaxlib"
  return path


def start_jax(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
  others = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, "-c", PROGRAM, *args],
    env={**others, "JAX_PLATFORMS": "cpu", **env},
    capture_output=True,
    text=True,
  )


def test_the_installed_jaxlib_starts_with_the_flags_that_are_set() -> None:
  path = installed_jaxlib()
  process = start_jax(str(path))
  assert process.returncode == 0, process.stderr
  # Should one be missing here, this jaxlib does not know it any more.
  assert process.stdout == f"{GPU_FLAGS}\n[CpuDevice(id=0)]\n"


def test_the_installed_jaxlib_ends_at_a_flag_that_is_not_in_it() -> None:
  invented = "--xla_gpu_enable_latency_hiding_scheduled=true"
  assert xla_flags.find_unknown(names([invented]), [installed_jaxlib()])
  process = start_jax("nothing", XLA_FLAGS=f"{HIDING} {invented}")
  assert process.returncode != 0
  assert f"Unknown flag in XLA_FLAGS: {invented}" in process.stderr


def test_a_flag_must_be_known_to_every_library(
  tmp_path: Path, knowing_all: list[Path]
) -> None:
  newer = library(tmp_path / "newer.so", GPU_FLAGS[1:])
  environ: dict[str, str] = {}
  applied = xla_flags.apply(environ, "gpu", [*knowing_all, newer])
  assert applied == GPU_FLAGS[1:]
  assert environ == {"XLA_FLAGS": " ".join(GPU_FLAGS[1:])}
  described = dict(xla_flags.describe(environ, "gpu", [*knowing_all, newer]))
  assert described.pop(*names(GPU_FLAGS[:1])) == "unknown to newer.so"
  assert list(described.values()) == GPU_FLAGS[1:]


def test_a_longer_name_is_another_flag(tmp_path: Path) -> None:
  longer = [f"{name}_too" for name in names(GPU_FLAGS)]
  path = library(tmp_path / "xla.so", [f"--{name}" for name in longer])
  assert xla_flags.apply({}, "gpu", [path]) == []


@pytest.mark.parametrize("content", [None, b""])
def test_without_a_library_that_can_be_read_none_is_set(
  content: bytes | None, tmp_path: Path
) -> None:
  path = tmp_path / "xla.so"
  if content is not None:
    path.write_bytes(content)
  environ: dict[str, str] = {}
  assert xla_flags.apply(environ, "gpu", [path]) == []
  assert xla_flags.apply(environ, "gpu", []) == []
  assert environ == {}


def test_names_are_found_wherever_they_are(tmp_path: Path) -> None:
  # The search goes on near the last one, but not only there.
  first, second, third = names(GPU_FLAGS)[:3]
  gap = bytes(2 * xla_flags._NEARBY_BYTES)
  words = [b"\0" + name.encode() + b"\0" for name in (third, first, second)]
  path = tmp_path / "xla.so"
  path.write_bytes(gap.join(words))
  assert xla_flags.find_unknown([first, second, third], [path]) == {}


@pytest.mark.parametrize(
  "theirs",
  [
    "--xla_gpu_enable_latency_hiding_scheduler=false",
    "--xla_gpu_enable_latency_hiding_scheduler",
    "--noxla_gpu_enable_latency_hiding_scheduler",
    "-xla_gpu_enable_latency_hiding_scheduler=0",
  ],
)
def test_what_the_user_sets_stays(theirs: str, knowing_all: list[Path]) -> None:
  text = f"--xla_dump_to=/tmp/dump {theirs}"
  environ = {"XLA_FLAGS": text}
  assert xla_flags.apply(environ, "gpu", knowing_all) == GPU_FLAGS[1:]
  assert environ == {"XLA_FLAGS": " ".join([*GPU_FLAGS[1:], text])}
  described = xla_flags.describe(environ, "gpu", knowing_all)
  assert described[0] == (*names([HIDING]), theirs)


def test_another_flag_with_the_same_beginning_is_not_the_users(
  knowing_all: list[Path],
) -> None:
  environ = {"XLA_FLAGS": f"{HIDING[:-5]}_in_parts=false"}
  assert HIDING in xla_flags.apply(environ, "gpu", knowing_all)


def test_a_file_of_flags_is_left_alone(knowing_all: list[Path]) -> None:
  environ = {"XLA_FLAGS": " /etc/xla_flags"}
  assert xla_flags.apply(environ, "gpu", knowing_all) == []
  assert environ == {"XLA_FLAGS": " /etc/xla_flags"}


def test_setting_them_twice_changes_nothing(knowing_all: list[Path]) -> None:
  environ: dict[str, str] = {}
  assert xla_flags.apply(environ, "tpu", knowing_all) == TPU_FLAGS
  assert environ == {"LIBTPU_INIT_ARGS": " ".join(TPU_FLAGS)}
  assert xla_flags.apply(environ, "tpu", knowing_all) == []
  assert environ == {"LIBTPU_INIT_ARGS": " ".join(TPU_FLAGS)}


def test_the_switch(knowing_all: list[Path]) -> None:
  environ = {"DISTLM_XLA_FLAGS": "off"}
  assert xla_flags.apply(environ, "gpu", knowing_all) == []
  assert environ == {"DISTLM_XLA_FLAGS": "off"}
  described = xla_flags.describe(environ, "gpu", knowing_all)
  assert {state for _, state in described} == {"DISTLM_XLA_FLAGS=off"}
  environ = {"DISTLM_XLA_FLAGS": "on"}
  assert xla_flags.apply(environ, "gpu", knowing_all) == GPU_FLAGS
  with pytest.raises(UsageError, match=r"^DISTLM_XLA_FLAGS=no: it must be on"):
    xla_flags.apply({"DISTLM_XLA_FLAGS": "no"}, "cpu")


def test_on_a_cpu_the_sums_that_were_wrong_are_off() -> None:
  environ = {"JAX_PLATFORMS": "cpu"}
  # Should it be missing here, this jaxlib does not know it any more.
  assert xla_flags.apply(environ) == xla_flags.recommended("cpu")["XLA_FLAGS"]
  assert "REDUCE" not in environ["XLA_FLAGS"]


@pytest.mark.parametrize(
  ("files", "wanted", "platform"),
  [
    (["dev/nvidia0"], "", "gpu"),
    (["dev/nvidia0"], "cuda,cpu", "gpu"),
    (["dev/nvidia0"], "cpu", "cpu"),
    (["dev/nvidia-caps"], "", "cpu"),
    (["proc/driver/nvidia"], "", "gpu"),
    (["dev/accel0"], "", "tpu"),
    (["dev/vfio/0"], "tpu,cpu", "tpu"),
    (["dev/vfio/vfio"], "", "cpu"),
    (["dev/accel0"], "cpu", "cpu"),
    (["dev/nvidia0", "dev/accel0"], "tpu", "tpu"),
    ([], "", "cpu"),
  ],
)
def test_the_platform_is_found(
  files: list[str],
  wanted: str,
  platform: str,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  root, packages = tmp_path / "root", tmp_path / "packages"
  for file in files:
    (root / file).mkdir(parents=True)
  environ = {"JAX_PLATFORMS": wanted}
  # Of a machine whose JAX is for CPUs alone. The empty packages hide others.
  for package in ("jax_plugins", "libtpu"):
    (packages / package).mkdir(parents=True)
    (packages / package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, package, raising=False)
  monkeypatch.syspath_prepend(packages)
  assert xla_flags.find_platform(environ, root) == "cpu"

  (packages / "jax_plugins/xla_cuda13").mkdir()
  for name, size in (("xla_cuda_plugin.so", 2), ("other.so", 1)):
    (packages / "jax_plugins/xla_cuda13" / name).write_bytes(bytes(size))
  (packages / "libtpu/libtpu.so").touch()
  assert xla_flags.find_platform(environ, root) == platform
  found = xla_flags.find_libraries(platform, environ)
  assert [path.name for path in found] == {
    "gpu": [installed_jaxlib().name, "xla_cuda_plugin.so"],
    "tpu": ["libtpu.so"],
    "cpu": [installed_jaxlib().name],
  }[platform]


def test_the_variable_of_another_libtpu() -> None:
  environ = {"TPU_LIBRARY_PATH": "/opt/libtpu.so"}
  found = xla_flags.find_libraries("tpu", environ)
  assert found == [Path("/opt/libtpu.so")]
