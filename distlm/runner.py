"""Runs any JAXline experiment: checkpoints on disk, TensorBoard, evaluation.

JAXline's own `platform.main` needs TensorFlow, keeps its checkpoints in memory
and evaluates in a thread beside training, which deadlocks as soon as two
threads run collectives in different orders. Here the loop is JAXline's
`train.train`, and evaluation takes place between two of its steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jaxline.train
import jaxline.utils
from absl import flags
from jaxline import base_config
from ml_collections import config_dict

from distlm import arguments, facts, loop, parallel
from distlm.checkpoint import DiskCheckpointer
from distlm.config import apply_overrides, load_config_file
from distlm.console import Console
from distlm.disk import disk_errors_in_one_line
from distlm.errors import RunError, UsageError
from distlm.evaluation import Evaluation, read_best
from distlm.logfile import logging_to_file
from distlm.loop import ExperimentFactory, Job
from distlm.profiling import TraceWindow
from distlm.replicas import ReplicaCheck
from distlm.saving import Saver
from distlm.settings import RUNNER_SETTINGS, ReplicaCheckConfig
from distlm.stop import StopRequest
from distlm.watchdog import Watchdog
from distlm.workdir import check_mode, claim
from distlm.writers import RunWriter


def main(
  experiment_class: ExperimentFactory, argv: Sequence[str] | None = None
) -> NoReturn:
  """Runs an experiment from the command line, as JAXline's `platform.main`.

  To be called by the file of an experiment:

      if __name__ == "__main__":
        runner.main(MyExperiment)

  The config file gives what `jaxline.base_config` has. It may set
  `config.evaluation_interval`, for the mode "train_eval", and
  `config.replica_check_interval`, both in steps, and
  `config.watchdog_seconds`; see `Job`.

  Args:
    experiment_class: any JAXline experiment.
    argv: the arguments, or None for those of the process.
  """

  def command() -> None:
    others, overrides = arguments.split_overrides(
      sys.argv[1:] if argv is None else argv
    )
    parser = arguments.Parser(allow_abbrev=False)
    arguments.add_run_arguments(parser)
    arguments.add_mode_argument(parser, default="train")
    arguments.add_once_argument(parser)
    args = parser.parse_args(others)
    mode, workdir = args.jaxline_mode, Path(args.workdir)
    meeting = arguments.find_meeting(args)
    with contextlib.ExitStack() as stack:
      with meeting.attended():
        config = _read_config(args.config, overrides)
        settings = json.loads(config.to_json_best_effort())
        config.one_off_evaluate = args.once
        check_mode(workdir, mode, args.once)
        if meeting.is_first:
          stack.enter_context(claim(workdir, settings, mode, args.once))
        program = Path(sys.argv[0])
        code = facts.fingerprint([program] if program.is_file() else [])
        more = {"--jaxline_mode": mode, "the program": code}
        meeting.compare(facts.of_run(settings, args.devices, more))
      parallel.start(args.devices, meeting.spec)
      set_jaxline_flags(args)
      job = Job(
        experiment_class,
        config,
        workdir,
        settings,
        evaluation_interval=config.evaluation_interval,
        replica_check=ReplicaCheckConfig(config.replica_check_interval),
        watchdog_secs=config.watchdog_seconds,
      )
      stopped_by = run(job, mode)
    arguments.exit_as_asked(args, stopped_by)

  arguments.run_command(command)


def _read_config(
  path: str, overrides: Sequence[tuple[str, str]]
) -> config_dict.ConfigDict:
  """Returns the checked configuration of any JAXline experiment."""
  config = load_config_file(path)
  with config.unlocked():
    for key, default in RUNNER_SETTINGS.items():
      config[key] = config.get(key, default)
  apply_overrides(config, overrides)
  for key, default in RUNNER_SETTINGS.items():
    if type(config[key]) not in (int, type(default)) or not config[key] >= 0:
      raise UsageError(f"config.{key}={config[key]!r}: it must be 0 or more")
  try:
    base_config.validate_config(config)
  except ValueError as error:
    raise UsageError(f"--config={path}: {error}") from error
  return config


def set_jaxline_flags(args: argparse.Namespace) -> None:
  """Hands the debugging flags of `arguments.add_run_arguments` to JAXline."""
  for name in ("jaxline_disable_pmap_jit", "jaxline_post_mortem"):
    setattr(flags.FLAGS, name, getattr(args, name))


def run(job: Job, mode: str) -> int:
  """Trains, evaluates, or both.

  An experiment may have seven methods that JAXline does not know of:
  `summary_rows()` and `closing_rows()`, (name, value) pairs shown at the start
  and the end; `pause()`, called before what is not training, which raises what
  went wrong in the steps so far; `before_save()`, called then by all processes;
  `without_parts(value)`, None in place of what differs between devices by
  design; `on_repair()`, called when a replica was given the values of the
  others; and `close()`, called at the end. If it sets `CHECKPOINTS_ARE_FINITE`,
  infinities are saved as little as NaNs.

  Args:
    job: what to run.
    mode: "train"; "eval", which evaluates each new checkpoint of the workdir;
      or "train_eval", which evaluates during training and at its end.

  Returns:
    The number of the signal that stopped the training, or 0.

  Raises:
    UsageError: for an input that cannot work.
    RunError: for a failure with a known cause, such as a full disk.
  """
  _check_jaxline_settings(job.config)
  parallel.repair_jaxline()
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # JAXline reads its debugging flags.
  checkpointer = DiskCheckpointer(
    job.workdir / "checkpoints",
    job.config.max_checkpoints_to_keep,
    job.settings,
  )
  work = _evaluate if mode == "eval" else _train
  with (
    disk_errors_in_one_line(str(job.workdir)),
    logging_to_file(job.workdir, mode),
    contextlib.closing(checkpointer),
  ):
    return int(jaxline.utils.debugger_fallback(work)(job, checkpointer, mode))


def _check_jaxline_settings(config: config_dict.ConfigDict) -> None:
  for key in ("train_checkpoint_all_hosts", "best_checkpoint_all_hosts"):
    if config[key]:
      raise UsageError(
        f"config.{key}=True: process 0 alone saves; set it to False"
      )
  for key in ("", "logging_", "checkpoint_"):
    value = config[f"{key}interval_type"]
    if value not in ("steps", "secs") and not (key and value is None):
      raise UsageError(
        f"config.{key}interval_type={value!r}: it must be steps or secs"
      )
  saves_by = config.checkpoint_interval_type or config.interval_type
  if saves_by == "secs" and parallel.process_count() > 1:
    raise UsageError(
      "config.interval_type=secs: the clocks of several processes differ, so"
      " that they would not save together; set it to steps"
    )


def _evaluate(job: Job, checkpointer: DiskCheckpointer, mode: str) -> int:
  parallel.end_on_sigterm()
  console = Console()
  config = config_dict.ConfigDict(job.config)
  where = job.workdir / "checkpoints"
  if not config.one_off_evaluate:
    if parallel.process_index() == 0:
      console.print_line(
        f"evaluating each new checkpoint in {where}, until that of step"
        f" {config.training_steps:,}; Ctrl-C ends it"
      )
  elif checkpointer.can_be_restored("latest") or config.eval_initial_weights:
    config.best_model_eval_metric = ""  # It holds no lock, so it saves nothing.
  else:
    raise UsageError(
      f"--workdir={job.workdir}: there is no checkpoint in {where}; train"
      " first, or name the workdir of a run"
    )
  with _open_writer(job, console, None, mode) as writer:
    jaxline.train.evaluate(
      job.experiment_class,
      config,
      checkpointer,
      writer and writer.for_split("eval"),
      jaxline_mode=mode,
    )
  return 0


def _train(job: Job, checkpointer: DiskCheckpointer, mode: str) -> int:
  start_time = time.monotonic()
  state = checkpointer.get_experiment_state("latest")
  config = config_dict.ConfigDict(job.config)
  config.save_checkpoint_interval = 0  # See PeriodicSaving.
  with contextlib.ExitStack() as stack:
    watchdog = stack.enter_context(_make_watchdog(job))
    resume_step = _find_start(job, checkpointer)
    stop = stack.enter_context(StopRequest())
    console = stack.enter_context(contextlib.closing(Console()))
    writer = stack.enter_context(_open_writer(job, console, resume_step, mode))
    stack.callback(loop.call_if_defined, state, "close")
    check = ReplicaCheck(state, **dataclasses.asdict(job.replica_check))
    saver = _make_saver(job, checkpointer, check, watchdog)
    actions: list[Any] = [loop.StartSummary(job, state, console)]
    last_actions: list[Any] = [loop.Progress(watchdog), check]
    if mode == "train_eval":
      last_actions.append(
        Evaluation(job, checkpointer, saver, writer, watchdog)
      )
    if parallel.process_index() == 0:
      actions.append(stack.enter_context(_make_trace(job, console)))
    # JAXline fails on the None that turns its rows off, if it has a writer.
    has_rows = config.log_train_data_interval is not None
    jaxline.train.train(
      loop.adapted(
        job.experiment_class,
        stop,
        saver,
        job.config.save_checkpoint_interval,
        last_actions,
      ),
      config,
      checkpointer,
      writer.for_split("train") if writer and has_rows else None,
      periodic_actions=tuple(actions),
    )
    if writer is not None:
      writer.raise_if_failed()
      rows = loop.closing_rows(job, state, read_best(checkpointer), start_time)
      console.finish(
        "finished" if loop.is_over(job, state) else "stopped", rows
      )
  if not stop.signal and parallel.process_count() > 1:
    # It may have come to another process.
    return 0 if loop.is_over(job, state) else signal.SIGTERM
  return stop.signal


def _make_watchdog(job: Job) -> Watchdog:
  return Watchdog(
    job.watchdog_secs,
    job.workdir,
    parallel.process_index(),
    parallel.process_count(),
  )


def _make_trace(job: Job, console: Console) -> TraceWindow:
  return TraceWindow(
    job.workdir / "profile",
    **dataclasses.asdict(job.profile),
    print_line=console.print_line,
  )


def _make_saver(
  job: Job,
  checkpointer: DiskCheckpointer,
  check: ReplicaCheck,
  watchdog: Watchdog,
) -> Saver:
  state = checkpointer.get_experiment_state("latest")

  def settle_last_step(step: int) -> None:
    del step
    loop.call_if_defined(state, "pause")

  return Saver(
    checkpointer,
    [settle_last_step, check.check_now],
    lambda: loop.call_if_defined(state, "before_save"),
    job.on_save_error,
    watchdog,
  )


def _find_start(job: Job, checkpointer: DiskCheckpointer) -> int | None:
  """Returns the step of the checkpoint that training goes on from.

  Process 0 looks which are intact, and the others go by what it found.
  """
  latest = checkpointer.series("latest")
  if parallel.process_index() == 0:
    checkpointer.series("best").newest_intact(True, may_start_anew=True)
    latest.newest_intact(set_aside=True)
  step = latest.newest()
  of_process_0 = parallel.agree(-1 if step is None else step)
  if of_process_0 != (-1 if step is None else step):
    raise RunError(
      f"--workdir={job.workdir}: process {parallel.process_index()} sees a"
      f" checkpoint of step {step}, process 0 of step {of_process_0}; give a"
      " directory on a file system that all processes share"
    )
  if step is not None and step > job.config.training_steps:
    raise UsageError(
      f"training_steps={job.config.training_steps}: the run in"
      f" --workdir={job.workdir} is at step {step} already; set it to at least"
      " that"
    )
  return step


@contextlib.contextmanager
def _open_writer(
  job: Job, console: Console, resume_step: int | None, mode: str
) -> Iterator[RunWriter | None]:
  """Gives the writer of process 0, and None to the others."""
  if parallel.process_index() != 0:
    yield None
    return
  with RunWriter(
    job.workdir, resume_step, console.log_scalars, splits=mode.split("_")
  ) as writer:
    if mode != "eval":
      writer.write_config(job.settings)
    yield writer
