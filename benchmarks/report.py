"""Writes benchmarks/RESULTS.md, and its plot, from benchmarks/results.json.

python benchmarks/run.py --only=
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs

PLOT = "results.svg"
_PACKAGES = (
  *("jax", "jaxlib", "dm-haiku", "optax", "jaxline", "orbax-checkpoint"),
  *("numpy", "torch"),
)
_GIB = 2**30
# Other work at the start, in cores; the section before leaves some.
_MAX_LOAD = 4.0

# Name of a section to its module and entry: "result" and "conditions".
Sections = Mapping[str, tuple[ModuleType, dict[str, Any]]]


def find_conditions() -> dict[str, Any]:
  """Returns what figures depend on, before they are measured."""
  versions = {"Python": platform.python_version()}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    "machine": {
      "CPU": _cpu_model(),
      "cores": str(os.cpu_count()),
      "memory": f"{_memory_bytes() / _GIB:.0f} GiB",
      "platform": platform.platform(),
    },
    "versions": versions,
    "commit": _commit(),
    "date": datetime.datetime.now().isoformat(" ", timespec="minutes"),
    "load": round(os.getloadavg()[0], 2),
  }


def _cpu_model() -> str:
  with contextlib.suppress(OSError):
    for line in Path("/proc/cpuinfo").read_text().splitlines():
      key, _, value = line.partition(":")
      if key.strip() == "model name":
        return value.strip()
  return platform.processor() or platform.machine()


def _memory_bytes() -> int:
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _commit() -> str:
  """Returns the commit, and whether files differ from it."""
  try:
    commit, changes = (
      subprocess.run(
        ["git", *command],
        cwd=jobs.ROOT,
        check=True,
        capture_output=True,
        text=True,
      ).stdout.strip()
      for command in (
        ("rev-parse", "--short", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no", "distlm"),
      )
    )
  except (OSError, subprocess.CalledProcessError):
    return "unknown"
  return f"{commit} with changes" if changes else commit


def write(sections: Sections, directory: Path) -> None:
  """Writes the report and its plot into a directory."""
  plot = _draw(sections, directory / PLOT)
  (directory / "RESULTS.md").write_text(_render(sections, plot))


def _render(sections: Sections, plot: str) -> str:
  newest = max(
    (entry["conditions"] for _, entry in sections.values()),
    key=lambda conditions: conditions["date"],
  )
  facts = {**newest["machine"], "versions": _versions(newest)}
  rows = [row for name in sections for row in _target_rows(sections, name)]
  parts = [
    "# Benchmarks",
    "`make bench` measures and writes all of this; `python benchmarks/run.py"
    " --only=NAME` measures one section again.",
    jobs.markdown(("machine", ""), list(facts.items())),
    jobs.markdown(("section", "what", "value", "target", "verdict"), rows),
    plot,
    *(
      _render_section(name, module, entry, newest)
      for name, (module, entry) in sections.items()
    ),
  ]
  return "\n\n".join(filter(None, parts)) + "\n"


def _target_rows(sections: Sections, name: str) -> list[Sequence[str]]:
  module, entry = sections[name]
  find_targets = getattr(module, "targets", lambda result: [])
  return [
    (name, what, f"{value:,.3f}", text, "met" if is_met else "**not met**")
    for what, value, text, is_met in find_targets(entry["result"])
  ]


def _render_section(
  name: str,
  module: ModuleType,
  entry: dict[str, Any],
  newest: dict[str, Any],
) -> str:
  conditions = entry["conditions"]
  notes = [
    f"commit {conditions['commit']}, {conditions['date']}",
    f"load average at the start {conditions['load']}",
  ]
  if entry["is_quick"]:
    notes.append("quick: fewer rounds and sizes")
  if conditions["load"] > _MAX_LOAD:
    notes.append("**the machine was busy**: believe no ratio of times")
  if conditions["machine"] != newest["machine"]:
    notes.append(f"**another machine**: {conditions['machine']}")
  if conditions["versions"] != newest["versions"]:
    notes.append(f"**other versions**: {_versions(conditions)}")
  summary = (module.__doc__ or name).splitlines()[0]
  return (
    f"## {name}\n\n{summary} ({'; '.join(notes)})"
    f"\n\n{module.table(entry['result'])}"
  )


def _versions(conditions: dict[str, Any]) -> str:
  return ", ".join(
    f"{package} {version}"
    for package, version in conditions["versions"].items()
  )


def _ratio_bars(result: dict[str, Any]) -> dict[str, float]:
  """Returns tokens/s of the whole loop over those of each peer."""
  return {
    f"{size}, {contender.removesuffix(', whole loop')} / {peer}": ratio
    for size, section in result.items()
    for contender, row in section["rows"].items()
    if contender.endswith("whole loop")
    for peer, ratio in row["ratios"].items()
  }


def _memory_bars(result: dict[str, Any]) -> dict[str, float]:
  """Returns the memory of updates over that of the plain one."""
  plain = {
    row["model"]: row["needed"]
    for row in result["updates"]
    if row["variant"] == "plain"
  }
  return {
    f"{row['model']}, {row['variant']}": row["needed"] / plain[row["model"]]
    for row in result["updates"]
    if row["variant"] != "plain"
  }


_PANELS: dict[str, tuple[str, Callable[[Any], dict[str, float]]]] = {
  "throughput": ("tokens/s over those of a peer; more is better", _ratio_bars),
  "memory": (
    "memory over that of a plain update; less is better",
    _memory_bars,
  ),
}


def _draw(sections: Sections, path: Path) -> str:
  """Draws what there is of the panels; returns Markdown that shows it."""
  panels = [
    (title, find_bars(sections[name][1]["result"]))
    for name, (title, find_bars) in _PANELS.items()
    if name in sections
  ]
  if not panels:
    return ""
  if not importlib.util.find_spec("matplotlib"):
    print('no plot: pip install -e ".[bench]" brings matplotlib')
    return ""
  import matplotlib

  matplotlib.use("svg")
  # The same file for the same figures.
  matplotlib.rcParams["svg.hashsalt"] = "distlm"
  from matplotlib import pyplot

  height = 0.3 * max(len(bars) for _, bars in panels) + 1
  figure, axes = pyplot.subplots(
    1, len(panels), figsize=(7 * len(panels), height), squeeze=False
  )
  for axis, (title, bars) in zip(axes[0], panels, strict=True):
    shown = axis.barh(list(bars), list(bars.values()), color="tab:blue")
    axis.bar_label(shown, fmt="%.2f", padding=3)
    axis.axvline(1, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_title(title)
  figure.tight_layout()
  figure.savefig(path, metadata={"Date": None})
  return f"![Tokens/s and memory, as ratios]({path.name})"
