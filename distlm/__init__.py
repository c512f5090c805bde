"""distlm: exact data-parallel language-model training on pmap, by JAXline."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and the module that defines each. They are imported on first
# use, because `import distlm` must not pay for importing JAX.
_PUBLIC = {
  "GradientUpdater": "distlm.updater",
  "LanguageModelExperiment": "distlm.experiment",
  "build_forward_fn": "distlm.model.transformer",
  "get_base_config": "distlm.config",
  "lm_loss_fn": "distlm.losses",
  "parse_config": "distlm.config",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
  if name not in _PUBLIC:
    raise AttributeError(f"module 'distlm' has no attribute {name!r}")
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
  return __all__
