"""`distlm`, with an error of one process at one step, once.

FAULT names the process and the step; FAULT_FILE is there when it has happened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distlm import cli
from distlm.experiment import LanguageModelExperiment

_step = LanguageModelExperiment.step


def _step_or_fail(self: LanguageModelExperiment, **kwargs: Any) -> Any:
  process_id, step = os.environ["FAULT"].split(":")
  marker = Path(os.environ["FAULT_FILE"])
  if (
    os.environ["DISTLM_PROCESS_ID"] == process_id
    and self._data_position["step"] >= int(step)
    and not marker.exists()
  ):
    marker.touch()
    raise LookupError("a fault of the experiment")
  return _step(self, **kwargs)


if __name__ == "__main__":
  LanguageModelExperiment.step = _step_or_fail  # type: ignore[method-assign]
  cli.main()
