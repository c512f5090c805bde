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
from typing import TYPE_CHECKING, NoReturn

import distlm
from distlm import arguments, inspection
from distlm.errors import UsageError

if TYPE_CHECKING:
  from distlm.data.tokenizers import Tokenizer

_TOKENIZER_FILE = "tokenizer.json"
_VERIFIED_FAKE_DEVICES = 8


def main(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line, and ends the process with its exit code."""
  arguments.run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
  others, overrides = arguments.split_overrides(argv)
  args = _make_parser().parse_args(others)
  if args.command == "verify":
    _verify(args, overrides)
  elif args.command == "checkpoint":
    inspection.run(args)
  else:
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
  verify = commands.add_parser(
    "verify",
    allow_abbrev=False,
    help="prove that all layouts of devices compute what one device computes",
  )
  arguments.add_job_arguments(verify)
  verify.add_argument(
    "--steps", type=int, default=4, help="updates on each layout"
  )
  inspection.add_arguments(
    commands.add_parser(
      "checkpoint",
      allow_abbrev=False,
      help="list, verify, inspect and compare the checkpoints of a workdir",
    )
  )
  return parser


def _verify(
  args: argparse.Namespace, overrides: Sequence[tuple[str, str]]
) -> None:
  from distlm import config as configs
  from distlm.data import token_store

  if args.steps < 1:
    raise UsageError(f"--steps={args.steps}: it must be 1 or more")
  config_dict = configs.load_config_file(args.config)
  configs.apply_overrides(config_dict, overrides)
  config = configs.parse_config(config_dict)
  store = token_store.open_token_store(config.data)

  from distlm import console, parallel
  from distlm.verify import report

  parallel.start(
    args.devices,
    args.coordinator,
    args.num_processes,
    args.process_id,
    num_fake_devices=_VERIFIED_FAKE_DEVICES,
  )
  shown = console.Console()
  report.verify(config, store, args.steps, shown.print_line)


def _run_language_model(
  args: argparse.Namespace, overrides: Sequence[tuple[str, str]]
) -> None:
  """Checks everything that can be checked, then runs the experiment."""
  from distlm import config as configs
  from distlm import workdir as workdirs
  from distlm.data import corpora, loader, token_store, tokenizers

  mode, workdir = args.jaxline_mode, Path(args.workdir)
  config_dict = configs.load_config_file(args.config)
  configs.apply_overrides(config_dict, overrides)
  config = configs.parse_config(config_dict)
  settings = config.to_dict()
  workdirs.check_mode(workdir, mode, args.once)
  workdirs.check_settings(workdir, settings)
  documents = corpora.read_documents(config.data.source)
  tokenizer = _load_tokenizer(workdir, config.data.tokenizer)
  workdirs.check_corpus(workdir, config.data.source, documents)
  store = token_store.open_token_store(config.data, tokenizer, documents)
  loader.check_corpus(len(store.tokens), config.data)

  from distlm import experiment, parallel, runner

  parallel.start(
    args.devices, args.coordinator, args.num_processes, args.process_id
  )
  loader.check_layout(config.data, experiment.current_layout(config))
  runner.set_jaxline_flags(args)
  with runner.claim(workdir, settings, mode, args.once):
    if parallel.process_index() == 0 and tokenizer is None:
      tokenizers.save_tokenizer(workdir / _TOKENIZER_FILE, store.tokenizer)
      workdirs.write_corpus(workdir, documents)
    stopped_by = runner.run(
      runner.Job(
        functools.partial(experiment.LanguageModelExperiment, store=store),
        configs.jaxline_config(config, args.once),
        workdir,
        settings,
        config.evaluation.interval,
        config.profile,
        config.replica_check,
        config.checkpoint.on_error,
      ),
      mode,
    )
  arguments.exit_as_asked(args, stopped_by)


def _load_tokenizer(workdir: Path, name: str) -> Tokenizer | None:
  """Returns the tokenizer of the run in a workdir, or None if there is none."""
  from distlm import workdir as workdirs
  from distlm.data import tokenizers

  path = workdir / _TOKENIZER_FILE
  if not (path.exists() and workdirs.has_checkpoint(workdir)):
    return None
  tokenizer = tokenizers.load_tokenizer(path)
  if tokenizer.name != name:
    raise UsageError(
      f"data.tokenizer={name}: the run in --workdir={workdir} has"
      f" {tokenizer.name}; keep it or use another directory"
    )
  return tokenizer
