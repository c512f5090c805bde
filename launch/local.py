"""Runs a job of several processes on this machine, as `distlm launch` does.

python launch/local.py --processes=2 --devices-per-process=4 -- distlm train ...
"""

from __future__ import annotations

import sys

from distlm import arguments, launcher


def main() -> None:
  """Runs the command line."""
  own, command = launcher.split_command(sys.argv[1:])
  parser = arguments.Parser(
    prog="launch/local.py",
    description="Runs a command as a job of processes on this machine.",
    allow_abbrev=False,
  )
  launcher.add_arguments(parser)
  sys.exit(launcher.run(parser.parse_args(own), command))


if __name__ == "__main__":
  arguments.run_command(main)
