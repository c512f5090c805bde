"""What commands that run an experiment share: their flags and exit codes.

It imports no JAX, so that a wrong flag is answered at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from distlm import cluster
from distlm.errors import RunError, UsageError
from distlm.rendezvous import Meeting

_MAX_START_SECS = 7 * 24 * 3600
# Beyond it, fake CPU devices wait for ever in their first collective.
_MAX_DEVICES = 256
_CONFIG_PREFIX = "--config."
_USAGE_CODE, _FAILURE_CODE, _INTERRUPT_CODE = 2, 1, 130


class Parser(argparse.ArgumentParser):
  """An argument parser that says what is wrong in one line."""

  def error(self, message: str) -> NoReturn:
    """Raises UsageError."""
    raise UsageError(f"{message}; see {self.prog} --help")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the flags that say what to run, where, and on which devices."""
  add_job_arguments(parser)
  parser.add_argument(
    "--workdir",
    required=True,
    type=_not_empty,
    help="the directory of the run",
  )
  parser.add_argument(
    "--signal-exit-code",
    action="store_true",
    help="end with 128 + the signal, such as 143 of SIGTERM, instead of 0, when"
    " a signal stopped the training",
  )
  for name, text in (
    ("jaxline_disable_pmap_jit", "run op by op, to look at it in a debugger"),
    ("jaxline_post_mortem", "enter the debugger after an exception"),
  ):
    parser.add_argument(f"--{name}", action="store_true", help=text)


def add_job_arguments(
  parser: argparse.ArgumentParser, config_required: bool = True
) -> None:
  """Adds the flags of the config, the devices and the processes."""
  parser.epilog = (
    "Any setting of the config file: --config.KEY=VALUE, such as"
    " --config.model.num_layers=6"
  )
  parser.add_argument(
    "--config",
    required=config_required,
    help="a Python file with get_config()",
  )
  # argparse converts the texts of the environment.
  parser.add_argument(
    "--devices",
    type=int,
    default=os.environ.get("DISTLM_DEVICES"),
    help="how many devices of this process; on a machine without accelerators,"
    " fake CPU ones",
  )
  parser.add_argument(
    "--coordinator",
    help="host:port on which process 0 of several listens; by default"
    " DISTLM_COORDINATOR, else what SLURM, Open MPI, Cloud TPU or Kubernetes"
    " say",
  )
  parser.add_argument(
    "--num-processes",
    type=int,
    help="processes of the job; by default DISTLM_NUM_PROCESSES, else as above",
  )
  parser.add_argument(
    "--process-id",
    type=int,
    help="which of them this one is, from 0; by default DISTLM_PROCESS_ID, else"
    " as above",
  )
  parser.add_argument(
    "--start-timeout",
    type=float,
    metavar="SECS",
    default=os.environ.get("DISTLM_START_TIMEOUT", "300"),
    help="how long to wait for the other processes (default: %(default)s)",
  )


def find_meeting(args: argparse.Namespace) -> Meeting:
  """Returns the meeting of the job that this process belongs to.

  Args:
    args: with the flags of `add_job_arguments`.

  Raises:
    UsageError: if one of them cannot work.
  """
  if args.devices is not None and not 1 <= args.devices <= _MAX_DEVICES:
    raise UsageError(
      f"--devices={args.devices}: it must be 1 or more, and at most"
      f" {_MAX_DEVICES}"
    )
  if not 0 < args.start_timeout <= _MAX_START_SECS:
    raise UsageError(
      f"--start-timeout={args.start_timeout:g}: it must be positive, and at"
      f" most {_MAX_START_SECS}"
    )
  return Meeting(
    cluster.find_process(
      args.coordinator, args.num_processes, args.process_id, os.environ
    ),
    args.start_timeout,
  )


def exit_as_asked(args: argparse.Namespace, stopped_by: int) -> None:
  """Ends the process if `--signal-exit-code` asks to, after a saved stop.

  Args:
    args: with the flags of `add_run_arguments`.
    stopped_by: the number of the signal, or 0.
  """
  if stopped_by and args.signal_exit_code:
    sys.exit(128 + stopped_by)


def _not_empty(text: str) -> str:
  if not text:
    raise argparse.ArgumentTypeError("it must not be empty")
  return text


def add_mode_argument(parser: argparse.ArgumentParser, default: str) -> None:
  """Adds JAXline's mode."""
  parser.add_argument(
    "--jaxline_mode",
    default=default,
    help="train, eval or train_eval (default: %(default)s)",
  )


def add_once_argument(parser: argparse.ArgumentParser) -> None:
  """Adds the flag of an evaluation that does not wait for checkpoints."""
  parser.add_argument(
    "--once",
    action="store_true",
    help="evaluate the newest checkpoint only, then end",
  )


def split_overrides(
  argv: Sequence[str],
) -> tuple[list[str], list[tuple[str, str]]]:
  """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of `argv`.

  Returns:
    The other arguments, and (key, value) pairs.
  """
  others, overrides = [], []
  arguments = iter(argv)
  for argument in arguments:
    if not argument.startswith(_CONFIG_PREFIX):
      others.append(argument)
      continue
    key, has_value, value = argument.removeprefix(_CONFIG_PREFIX).partition("=")
    if not has_value:
      value = next(arguments, "--")
      if value.startswith("--"):
        raise UsageError(f"{argument}: it needs a value: {argument}=VALUE")
    overrides.append((key, value))
  return others, overrides


def run_command(command: Callable[[], None]) -> NoReturn:
  """Runs `command`, shows its error, and ends the process with its exit code.

  The code is 0, 2 for what the user can mend in the command or its input, 130
  for an interrupt, and 1 for every other failure. A traceback is shown only for
  errors that distlm did not foresee.
  """
  code = 0
  if os.getpid() == 1:  # Of a container, where signals do nothing by default.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
  try:
    command()
  except UsageError as error:
    code = _show(error, _USAGE_CODE)
  except RunError as error:
    code = _show(error, _FAILURE_CODE)
  except KeyboardInterrupt:
    code = _INTERRUPT_CODE
  except Exception:  # The last place where it can be shown.
    traceback.print_exc()
    code = _FAILURE_CODE
  _flush()
  jax = sys.modules.get("jax")
  if code and jax is not None and jax.distributed.is_initialized():
    # A clean exit would wait for the other processes, which wait for this one.
    os._exit(code)
  sys.exit(code)


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    if stream is not None:
      try:
        stream.flush()
      except BrokenPipeError:  # Else Python complains of it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show(error: Exception, code: int) -> int:
  line = " ".join(str(error).split())
  print(f"error: {line}", file=sys.stderr)
  return code
