"""The `distlm` command.

Modules that import JAX are imported by the command that needs them, after what
can be checked without it, so that mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import distlm
from distlm import arguments, doctor, inspection, launcher, switches
from distlm.errors import UsageError

if TYPE_CHECKING:
  from distlm.data import corpora
  from distlm.data.token_store import TokenStore
  from distlm.data.tokenizers import Tokenizer
  from distlm.settings import RunConfig

_COMMANDS = {
  "train": "train and evaluate; goes on where the workdir's run stopped",
  "eval": "evaluate the checkpoints of a workdir, each new one as it comes",
  "launch": "run a command as a job of several processes on this machine",
  "doctor": "look for what would keep a training from working",
  "verify": "prove that all layouts of devices compute what one computes",
  "checkpoint": "list, verify, inspect and compare checkpoints of a workdir",
}
_COMPUTING = ("train", "eval", "verify")
_TOKENIZER_FILE = "tokenizer.json"
_VERIFIED_FAKE_DEVICES = 8


def main(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs the command line, and ends the process with its exit code."""
  if argv is None and sys.argv[1:2] and sys.argv[1] in _COMPUTING:
    switches.restart_with_malloc_settings(os.environ)
  arguments.run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
  if argv and argv[0] == "launch":
    # What follows the `--` is the business of the command that it names.
    own, command = launcher.split_command(argv[1:])
    args = _make_parser().parse_args(["launch", *own])
    sys.exit(launcher.run(args, command))
  others, overrides = arguments.split_overrides(argv)
  args = _make_parser().parse_args(others)
  if args.command == "verify":
    _verify(args, overrides)
  elif args.command == "checkpoint":
    inspection.run(args)
  elif args.command == "doctor":
    if code := doctor.run(args, overrides):
      sys.exit(code)
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
  of = {
    name: commands.add_parser(name, allow_abbrev=False, help=text)
    for name, text in _COMMANDS.items()
  }
  arguments.add_mode_argument(of["train"], default="train_eval")
  of["eval"].set_defaults(jaxline_mode="eval")
  for name in ("train", "eval"):
    arguments.add_run_arguments(of[name])
    arguments.add_once_argument(of[name])
  launcher.add_arguments(of["launch"])
  arguments.add_job_arguments(of["verify"])
  of["verify"].add_argument(
    "--steps", type=int, default=4, help="updates on each layout"
  )
  doctor.add_arguments(of["doctor"])
  inspection.add_arguments(of["checkpoint"])
  return parser


def _verify(
  args: argparse.Namespace, overrides: Sequence[tuple[str, str]]
) -> None:
  from distlm import config as configs
  from distlm import facts
  from distlm.data import token_store

  meeting = arguments.find_meeting(args)
  with meeting.attended():
    if args.steps < 1:
      raise UsageError(f"--steps={args.steps}: it must be 1 or more")
    config_dict = configs.load_config_file(args.config)
    configs.apply_overrides(config_dict, overrides)
    config = configs.parse_config(config_dict)
    store = token_store.open_token_store(config.data)
    more = {"the text": store.fingerprint, "--steps": args.steps}
    meeting.compare(facts.of_run(config.to_dict(), args.devices, more))

  from distlm import console, parallel
  from distlm.verify import report

  parallel.start(args.devices, meeting.spec, _VERIFIED_FAKE_DEVICES)
  parallel.end_on_sigterm()
  shown = console.Console()
  report.verify(config, store, args.steps, shown.print_line)


class _Inputs(NamedTuple):
  """What a run is about: its settings and its text, checked."""

  config: RunConfig
  documents: Sequence[corpora.Document]
  tokenizer: Tokenizer | None  # of the run that is in the workdir
  store: TokenStore


def _run_language_model(
  args: argparse.Namespace, overrides: Sequence[tuple[str, str]]
) -> None:
  """Checks everything that can be checked, then runs the experiment."""
  from distlm import config as configs
  from distlm import facts
  from distlm import workdir as workdirs

  mode, workdir = args.jaxline_mode, Path(args.workdir)
  meeting = arguments.find_meeting(args)
  with contextlib.ExitStack() as stack:
    with meeting.attended():
      inputs = _check_inputs(args, overrides, meeting.spec.num_processes)
      settings = inputs.config.to_dict()
      if meeting.is_first:
        stack.enter_context(workdirs.claim(workdir, settings, mode, args.once))
      more = {"the text": inputs.store.fingerprint, "--jaxline_mode": mode}
      meeting.compare(facts.of_run(settings, args.devices, more))

    from distlm import experiment, parallel, runner
    from distlm.data import loader, tokenizers

    config, store = inputs.config, inputs.store
    parallel.start(args.devices, meeting.spec)
    # Again, now that it is known how many devices there are.
    loader.check_layout(config.data, experiment.current_layout(config))
    if meeting.is_first and inputs.tokenizer is None:
      tokenizers.save_tokenizer(workdir / _TOKENIZER_FILE, store.tokenizer)
      workdirs.write_corpus(workdir, inputs.documents)
    job = runner.Job(
      functools.partial(experiment.LanguageModelExperiment, store=store),
      configs.jaxline_config(config, args.once),
      workdir,
      settings,
      config.evaluation.interval,
      config.profile,
      config.replica_check,
      config.checkpoint.on_error,
      config.watchdog.seconds,
    )
    runner.set_jaxline_flags(args)
    stopped_by = runner.run(job, mode)
  arguments.exit_as_asked(args, stopped_by)


def _check_inputs(
  args: argparse.Namespace,
  overrides: Sequence[tuple[str, str]],
  num_processes: int,
) -> _Inputs:
  from distlm import config as configs
  from distlm import workdir as workdirs
  from distlm.data import corpora, loader, token_store

  workdir = Path(args.workdir)
  config_dict = configs.load_config_file(args.config)
  configs.apply_overrides(config_dict, overrides)
  config = configs.parse_config(config_dict)
  workdirs.check_mode(workdir, args.jaxline_mode, args.once)
  workdirs.check_settings(workdir, config.to_dict())
  documents = corpora.read_documents(config.data.source)
  tokenizer = _load_tokenizer(workdir, config.data.tokenizer)
  workdirs.check_corpus(workdir, config.data.source, documents)
  store = token_store.open_token_store(config.data, tokenizer, documents)
  loader.check_corpus(len(store.tokens), config.data)
  loader.check_layout(
    config.data,
    loader.Layout(
      process_count=num_processes,
      devices_per_process=args.devices or 1,
      accumulation_steps=config.accumulation_steps,
    ),
  )
  return _Inputs(config, documents, tokenizer, store)


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
