"""Tests of what `distlm launch` shows of its processes."""

from __future__ import annotations

import collections
import os
import pty
import re
import signal
import subprocess
import termios
import time
from pathlib import Path

import launched_job
import pytest


def test_lines_are_whole_and_name_their_process(tmp_path: Path) -> None:
  # In pieces, on both streams, to one reader.
  code = """
here("up"); wait_for("up.0", "up.1", "up.2")
for i in range(500):
  for stream in (1, 2):
    os.write(stream, f"{stream} {i} ".encode() + b"x" * 50)
    os.write(stream, f"{index}" .encode() * 50 + b"\\n" + b"")
"""
  argv = launched_job.command(code, processes=3)
  with launched_job.started(
    argv, tmp_path, stderr=subprocess.STDOUT
  ) as process:
    end, output, _ = launched_job.finish(process)
  assert end == 0
  numbers = collections.defaultdict(list)
  for line in output.splitlines():
    match = re.fullmatch(r"\[(\d)\] ([12]) (\d+) x{50}(\d{50})", line)
    assert match, line
    assert set(match[4]) == {match[1]}
    numbers[match[1], match[2]].append(int(match[3]))
  assert len(numbers) == 6
  assert all(found == list(range(500)) for found in numbers.values())


@pytest.mark.parametrize(
  ("writes", "shown"),
  [
    (r"b'no end'", b"no end\n"),
    (r"b'\xff\xfe\n\x00\n'", b"\xff\xfe\n\x00\n"),
    (r"b'\n  two  \n'", b"\n  two  \n"),
    (r"'grün\n'.encode()", "grün\n".encode()),
    (r"b'dos\r\nmac\r'", b"dos\nmac\n"),
    # A bar that is no terminal's; tqdm erases it before it writes a line.
    (r"b'\r 1%', b'\r99%', b'\r   \rline\n', b'\r100%\n'", b"line\n100%\n"),
    (r"b'gone\r    \r'", b""),
    (r"b'x' * 3_000_000, b'\n'", b"x" * 3_000_000 + b"\n"),
  ],
)
def test_all_bytes_are_shown(tmp_path: Path, writes: str, shown: bytes) -> None:
  code = f"for part in [{writes}]:\n  sys.stdout.buffer.write(part)\n"
  code += "  sys.stdout.flush(); time.sleep(0.02)"
  argv = launched_job.command(code, processes=1)
  with launched_job.started(argv, tmp_path) as process:
    output, errors = process.communicate(timeout=launched_job.TIMEOUT_SECS)
  assert (process.returncode, errors) == (0, b"")
  # A line of megabytes is cut rather than kept.
  assert all(len(line) < 1_200_000 for line in output.split(b"\n"))
  assert output.replace(b"x\nx", b"xx") == shown


def test_lines_come_as_they_are_printed(tmp_path: Path) -> None:
  argv = launched_job.command("print(index); wait_for('seen')")
  # Which the launcher sees to.
  with launched_job.started(argv, tmp_path, PYTHONUNBUFFERED="") as process:
    assert process.stdout is not None
    lines = sorted(process.stdout.readline() for _ in range(2))
    assert lines == [b"[0] 0\n", b"[1] 1\n"]
    (tmp_path / "seen").touch()
    assert launched_job.finish(process) == (0, "", "")


def test_a_process_may_close_its_output(tmp_path: Path) -> None:
  code = "print('a'); os.close(1); os.close(2); here('closed')"
  code, output, errors = launched_job.run(code, tmp_path)
  assert (code, sorted(output.splitlines())) == (0, ["[0] a", "[1] a"])
  assert errors == ""
  launched_job.pids(tmp_path, "closed.0", "closed.1")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away(tmp_path: Path, stream: str) -> None:
  code = f"""
for part in range(2):
  for i in range(2000):
    print("x" * 100, file=sys.{stream})
  wait_for("gone")
here("done")
wait_for("done.0", "done.1")
sys.exit(3 * index)
"""
  argv = launched_job.command(code)
  with launched_job.started(argv, tmp_path) as process:
    assert process.stdout is not None and process.stderr is not None
    gone, other = process.stdout, process.stderr
    if stream == "stderr":
      gone, other = other, gone
    assert gone.readline().endswith(b"x\n")
    gone.close()
    (tmp_path / "gone").touch()
    launched_job.pids(tmp_path, "done.0", "done.1")
    assert process.wait(launched_job.TIMEOUT_SECS) == 3
    last = b"error: process 1 failed first, with exit code 3\n"
    assert other.read() == (b"" if stream == "stderr" else last)


def test_closed_streams(tmp_path: Path) -> None:
  argv = launched_job.command("print(1); print(2, file=sys.stderr); here('x')")
  argv = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *argv]
  with launched_job.started(argv, tmp_path) as process:
    assert launched_job.finish(process) == (0, "", "")
  launched_job.pids(tmp_path, "x.0", "x.1")


def test_what_was_written_last_is_read_late(tmp_path: Path) -> None:
  # It fits into the pipes to and from the launcher, with what it holds.
  text = "".join(f"{i:0999}\n" for i in range(150))
  code = """
text = "".join(f"{i:0999}\\n" for i in range(150))
os.write(1, text.encode())
here("done")
"""
  argv = launched_job.command(code, processes=1)
  with launched_job.started(argv, tmp_path) as process:
    (done,) = launched_job.pids(tmp_path, "done.0")
    launched_job.wait_until(lambda: not launched_job.state(done))
    time.sleep(0.2)  # It ends the thread that reads.
    assert launched_job.finish(process) == (0, text, "")


def test_output_that_does_not_block(tmp_path: Path) -> None:
  # Such as that of a parent written in JavaScript.
  code = "here('up'); os.write(1, b'x' * 500_000)"
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  argv = launched_job.command(code, processes=1)
  with launched_job.started(argv, tmp_path, stdout=writer) as process:
    os.close(writer)
    launched_job.pids(tmp_path, "up.0")
    time.sleep(0.2)  # It meets a full pipe.
    with open(reader, "rb") as output:
      assert output.read() == b"x" * 500_000 + b"\n"
    assert process.wait(launched_job.TIMEOUT_SECS) == 0


# Writes until nobody reads it any more.
FLOOD = """
def flood():
  import select
  while select.select([], [1], [], 1)[1]:
    os.write(1, b"x" * 999 + b"\\n")
  here("stuck")
  while True:
    print("x" * 999)
"""


def test_a_reader_that_waits_does_not_stop_the_supervision(
  tmp_path: Path,
) -> None:
  code = f"{FLOOD}\nif index == 0: flood()\nwait_for('stuck.0'); sys.exit(3)"
  with launched_job.started(launched_job.command(code), tmp_path) as process:
    (stuck,) = launched_job.pids(tmp_path, "stuck.0")
    launched_job.wait_until(lambda: not launched_job.is_alive(stuck))
    code, output, errors = launched_job.finish(process)
  assert code == 3
  assert errors == "error: process 1 failed first, with exit code 3\n"
  *lines, last = output.splitlines()
  assert set(lines) == {"[0] " + "x" * 999}
  assert set(last.removeprefix("[0] ")) == {"x"}


def test_what_nobody_reads_does_not_outlast_a_second_signal(
  tmp_path: Path,
) -> None:
  argv = launched_job.command(f"{FLOOD}\nflood()")
  with launched_job.started(argv, tmp_path) as process:
    pids = launched_job.pids(tmp_path, "stuck.0", "stuck.1")
    process.send_signal(signal.SIGTERM)
    launched_job.wait_until(lambda: not any(map(launched_job.is_alive, pids)))
    process.send_signal(signal.SIGINT)  # Two SIGTERMs at once would be one.
    assert process.wait(launched_job.TIMEOUT_SECS) == 143


BAR = """
if index == 1:
  wait_for("half")
  print("a line", sys.stdout.isatty(), flush=True)
  print("an error", file=sys.stderr, flush=True)
  here("said")
  sys.exit()
from tqdm import tqdm
print(sys.stdout.isatty(), sys.stderr.isatty(), "", flush=True)
bar = tqdm(total=4, file=sys.stdout, dynamic_ncols=True, mininterval=0)
for i in range(4):
  bar.update()
  if i == 1:
    wait_for("said.1", "seen")
  if i == 2:
    bar.write("above")
    wait_for("fitted")
bar.close()
"""


def _on_terminal(tmp_path: Path, *columns: int) -> tuple[int, str]:
  """Runs a job with a bar on a terminal.

  Args:
    tmp_path: where it runs.
    *columns: of the terminal, at first and then from the middle on.

  Returns:
    The exit code, and all that the terminal got.
  """
  master, slave = pty.openpty()
  termios.tcsetwinsize(slave, (24, columns[0]))
  argv, shown = launched_job.command(BAR), b""
  with launched_job.started(
    argv, tmp_path, stdout=slave, stderr=slave
  ) as process:
    os.close(slave)
    while True:
      try:
        shown += os.read(master, 1 << 16)
      except OSError:  # The last that had the terminal has ended.
        break
      if b" 50%|" in shown or not columns[0]:
        (tmp_path / "half").touch()
      if b"a line" in shown and b"an error" in shown:
        termios.tcsetwinsize(master, (24, columns[-1]))
        (tmp_path / "seen").touch()
      if b"above" in shown:  # The process has been told the new width.
        (tmp_path / "fitted").touch()
    code = process.wait(launched_job.TIMEOUT_SECS)
  os.close(master)
  return code, shown.decode()


def _screen(shown: str) -> list[str]:
  """Returns the lines that a terminal shows in the end."""
  lines, column = [""], 0
  for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", shown):
    if part == "\n":
      lines.append("")
    elif part == "\r":
      column = 0
    elif part == "\x1b[K":
      lines[-1] = lines[-1][:column]
    else:
      after = lines[-1][column + len(part) :]
      lines[-1] = lines[-1][:column].ljust(column) + part + after
      column += len(part)
  return [line.rstrip() for line in lines]


def test_a_terminal_has_one_live_bar_below_all_lines(tmp_path: Path) -> None:
  code, shown = _on_terminal(tmp_path, 60, 50)
  assert code == 0
  *lines, bar, end = _screen(shown)
  assert end == ""
  assert lines[0] == "[0] True False"
  assert sorted(lines[1:]) == [
    "[0] above",
    "[1] a line False",
    "[1] an error",
  ]
  assert bar.startswith("[0] 100%|")
  # tqdm leaves a column, or none.
  assert 49 <= len(bar) <= 50
  bars = [part for part in re.split(r"[\r\n]|\x1b\[K", shown) if "%|" in part]
  assert 59 <= max(map(len, bars)) <= 60
  # What tqdm made for the old width does not wrap.
  at = next(i for i, part in enumerate(bars) if " 75%|" in part)
  assert max(map(len, bars[at:])) <= 50
  # It is back at once below what another said; spaces are left alone.
  assert "[1] an error\r\n[0]  50%|" in shown
  assert "[0] True False \r\n" in shown


def test_a_terminal_without_width_has_plain_lines(tmp_path: Path) -> None:
  code, shown = _on_terminal(tmp_path, 0)
  assert code == 0
  assert "[0] False False \r\n" in shown
  assert "\x1b[K[" not in shown
