"""The `distlm` command.

Modules that import JAX are imported by the command that needs them, after what
can be checked without it, so that mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import distlm
from distlm import arguments
from distlm.errors import UsageError

_TOKENIZER_FILE = "tokenizer.json"


def main(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line, and ends the process with its exit code."""
  arguments.run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
  others, overrides = arguments.split_overrides(argv)
  args = _make_parser().parse_args(others)
  _run_language_model(args, overrides)


def _make_parser() -> argparse.ArgumentParser:
  parser = arguments.Parser(
    prog="distlm",
    description="Trains language models on many devices, exactly.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "--version", action="version", version=f"distlm {distlm.__version__}"
  )
  commands = parser.add_subparsers(
    dest="command", required=True, parser_class=arguments.Parser
  )
  train = commands.add_parser(
    "train",
    allow_abbrev=False,
    help="train and evaluate; goes on where the workdir's run stopped",
  )
  arguments.add_mode_argument(train, default="train_eval")
  evaluate = commands.add_parser(
    "eval",
    allow_abbrev=False,
    help="evaluate the checkpoints of a workdir, each new one as it comes",
  )
  evaluate.set_defaults(jaxline_mode="eval")
  for command in (train, evaluate):
    arguments.add_run_arguments(command)
    arguments.add_once_argument(command)
  return parser


def _run_language_model(
  args: argparse.Namespace, overrides: Sequence[tuple[str, str]]
) -> None:
  """Checks everything that can be checked, then runs the experiment."""
  from distlm import config as configs
  from distlm import workdir as workdirs
  from distlm.data import loader, token_store, tokenizers

  mode, workdir = args.jaxline_mode, Path(args.workdir)
  config_dict = configs.load_config_file(args.config)
  configs.apply_overrides(config_dict, overrides)
  config = configs.parse_config(config_dict)
  settings = config.to_dict()
  workdirs.check_mode(workdir, mode, args.once)
  workdirs.check_settings(workdir, settings)
  tokenizer_path = workdir / _TOKENIZER_FILE
  tokenizer = None
  if tokenizer_path.exists() and workdirs.has_checkpoint(workdir):
    tokenizer = tokenizers.load_tokenizer(tokenizer_path)
    if tokenizer.name != config.data.tokenizer:
      raise UsageError(
        f"data.tokenizer={config.data.tokenizer}: the run in"
        f" --workdir={workdir} has {tokenizer.name}; keep it or use another"
        " directory"
      )
  store = token_store.open_token_store(config.data, tokenizer)
  loader.check_corpus(len(store.tokens), config.data)

  from distlm import experiment, parallel, runner

  parallel.start(
    args.devices, args.coordinator, args.num_processes, args.process_id
  )
  loader.check_layout(config.data, experiment.current_layout(config))
  runner.set_jaxline_flags(args)
  with runner.claim(workdir, settings, mode, args.once):
    if parallel.process_index() == 0 and tokenizer is None:
      tokenizers.save_tokenizer(tokenizer_path, store.tokenizer)
    runner.run(
      runner.Job(
        functools.partial(experiment.LanguageModelExperiment, store=store),
        configs.jaxline_config(config, args.once),
        workdir,
        settings,
        config.evaluation.interval,
        config.profile,
      ),
      mode,
    )
