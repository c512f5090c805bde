"""Collectives in the scheduled HLO of a compiled program, and what they hide.

The text of a compiled program, `compiled.as_text()`, lists what each device
runs, in turn. An asynchronous collective is two of its instructions; what is
between them runs while the collective does. It imports no JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
  *("all-reduce", "reduce-scatter", "all-gather"),
  *("all-to-all", "collective-permute"),
)
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8}
# What occupies no compute unit, or is no work of its own.
_NO_COMPUTE = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy"),
  *("copy-start", "copy-done", "async-start", "async-update", "async-done"),
  *("partition-id", "replica-id", "after-all", "opt-barrier", "broadcast"),
}
_MATMUL = re.compile(r'custom_call_target="[^"]*(gemm|matmul|cudnn)')
_HEADER = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][a-z-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


class Instruction(NamedTuple):
  """A line of HLO: `name = shape opcode(operands), attributes`."""

  name: str
  shape: str
  opcode: str
  rest: str  # operands and attributes

  def attribute(self, pattern: str) -> str:
    """Returns the group of the first match among the attributes, or ""."""
    found = re.search(pattern, self.rest)
    return found[1] if found else ""

  def called(self, role: str) -> str:
    """Returns the name of the computation that it calls, or ""."""
    return self.attribute(rf"\b{role}=%?([\w.-]+)")


class Collective(NamedTuple):
  """A collective, and what runs between its start and its end."""

  kind: str
  dtypes: str
  num_bytes: int  # of the whole value on one device, in one execution
  times: int  # executions in one update
  is_async: bool
  num_compute: int  # between start and end
  num_matmuls: int  # those of num_compute with a matrix multiplication


class _Start(NamedTuple):
  place: int
  collective: Instruction  # the operation itself, where the start wraps it


class Program:
  """The scheduled text of a compiled program, taken apart."""

  def __init__(self, text: str) -> None:
    self._computations: dict[str, list[Instruction]] = {"": []}
    self._entry = ""
    current: list[Instruction] = []
    for line in text.splitlines():
      if header := _HEADER.match(line):
        current = self._computations.setdefault(header[2], [])
        self._entry = header[2] if header[1] else self._entry
      elif found := _INSTRUCTION.match(line):
        current.append(Instruction(*found.groups()))

  def collectives(self) -> list[Collective]:
    """Returns those of one run, in order, loops included."""
    return list(self._collectives(self._entry, 1))

  def _collectives(self, name: str, times: int) -> Iterator[Collective]:
    schedule = list(self._schedule(name))
    starts: dict[str, _Start] = {}
    for place, instruction in enumerate(schedule):
      if instruction.opcode == "while":
        yield from self._collectives(
          instruction.called("body"), times * self._num_trips(instruction)
        )
      elif instruction.opcode in KINDS:
        yield _collective(instruction, instruction.shape, times)
      elif collective := self._started(instruction):
        starts[self._key(instruction)] = _Start(place, collective)
      elif start := starts.pop(self._key(instruction), None):
        between = schedule[start.place + 1 : place]
        is_wrapped = start.collective.opcode in KINDS
        yield _collective(
          start.collective,
          start.collective.shape if is_wrapped else instruction.shape,
          times,
        )._replace(
          is_async=True,
          num_compute=sum(map(self._num_compute, between)),
          num_matmuls=sum(map(self._num_matmuls, between)),
        )

  def _schedule(self, name: str) -> Iterator[Instruction]:
    """Yields what runs in turn, with calls (of command buffers) in place."""
    for instruction in self._computations[name]:
      if instruction.opcode == "call":
        yield from self._schedule(instruction.called("to_apply"))
      else:
        yield instruction

  def _started(self, instruction: Instruction) -> Instruction | None:
    """Returns the collective that an instruction starts, or None."""
    if instruction.opcode.removesuffix("-start") in KINDS:
      return instruction
    # XLA wraps those without opcodes of their own. libtpu makes fusions of all,
    # and has the fusions between start and done carry the collective on.
    if instruction.opcode == "async-start" or (
      instruction.name.startswith("async-collective-start")
    ):
      return self._wrapped(instruction)
    return None

  def _wrapped(self, instruction: Instruction) -> Instruction | None:
    inner = self._computations[instruction.called("calls")]
    return next((other for other in inner if other.opcode in KINDS), None)

  def _key(self, instruction: Instruction) -> str:
    """Returns what start and done have in common and no other instruction."""
    if instruction.name.startswith("async-collective-"):
      wrapped = self._wrapped(instruction)
      return wrapped.attribute(r'(chain_id="\d+")') if wrapped else ""
    if instruction.opcode.endswith("-done"):
      return instruction.attribute(r"%([\w.-]+)")
    return instruction.name if instruction.opcode.endswith("-start") else ""

  def _num_trips(self, loop: Instruction) -> int:
    """Returns how often a loop runs; 1 where the text does not say."""
    known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
    condition = self._computations[loop.called("condition")]
    bounds = [
      other.rest.partition(")")[0]
      for other in condition
      if other.opcode == "constant" and other.shape.startswith("s32[]")
    ]
    return int(known or (bounds[0] if len(bounds) == 1 else 1))

  def _num_compute(self, instruction: Instruction) -> int:
    if instruction.opcode == "while":
      body = self._schedule(instruction.called("body"))
      return self._num_trips(instruction) * sum(map(self._num_compute, body))
    is_other = (
      instruction.opcode in _NO_COMPUTE
      or instruction.opcode.removesuffix("-start").removesuffix("-done")
      in KINDS
      or instruction.name.startswith("async-collective-")
      or "AllocateBuffer" in instruction.rest
    )
    return 0 if is_other else 1

  def _num_matmuls(self, instruction: Instruction) -> int:
    if not self._num_compute(instruction):
      return 0
    if instruction.opcode == "while":
      body = self._schedule(instruction.called("body"))
      return self._num_trips(instruction) * sum(map(self._num_matmuls, body))
    if instruction.opcode == "fusion":
      inner = self._computations[instruction.called("calls")]
      return int(any(map(self._num_matmuls, inner)))
    return int(
      instruction.opcode in ("dot", "convolution")
      or bool(_MATMUL.search(instruction.rest))
    )


def _collective(instruction: Instruction, shape: str, times: int) -> Collective:
  """Returns a synchronous collective.

  Args:
    instruction: the operation, or its start.
    shape: of its result.
    times: executions in one update.
  """
  kind = instruction.opcode.removesuffix("-start")
  arrays = _ARRAY.findall(shape)
  num_bytes = sum(
    _ITEM_BYTES.get(dtype, 4)
    * math.prod(map(int, filter(None, sizes.split(","))))
    for dtype, sizes in arrays
  )
  if kind == "reduce-scatter":
    num_bytes *= _group_size(instruction)
  dtypes = ", ".join(sorted({dtype for dtype, _ in arrays}))
  return Collective(kind, dtypes, num_bytes, times, False, 0, 0)


def _group_size(instruction: Instruction) -> int:
  """Reads replica_groups={{0,1}, ...} or replica_groups=[groups,size]<=..."""
  if size := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
    return int(size)
  return 1 + instruction.attribute(r"replica_groups=\{\{([\d,]*)").count(",")
