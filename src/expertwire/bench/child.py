"""Other programs, which end when this process does, and which alone this process ends: Ctrl-C does not reach them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import IO

#: How long a program may take to end when it is asked to, seconds. mpirun removes what its ranks have left behind.
_PATIENCE_S = 10.0
#: Asks the kernel for SIGTERM when the parent ends, unless that has happened already, and becomes the program. A
#: process of its own, since Python may not run between fork and exec while it has threads.
_TIED = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_child(
    command: list[str], limit_s: float | None = None, *, watches_input: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends and return its exit status and what it said.

    Args:
        command: the program and its arguments.
        limit_s: longest time, seconds; None: as long as it takes.
        watches_input: the program sees to its end itself once its input, which is empty, ends with this process. Others
            get SIGTERM then, as often as this process has threads: too often for mpirun to remove what ranks leave.

    Raises:
        subprocess.TimeoutExpired: it was not done in time, and has been ended.
    """
    tie = [] if watches_input else [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid())]
    stdin = subprocess.PIPE if watches_input else subprocess.DEVNULL
    # Files, as a pipe would stay open for as long as anything that the program has started.
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [*tie, *command], stdin=stdin, stdout=told, stderr=errors, start_new_session=True
        ) as child:
            try:
                status = child.wait(limit_s)
            except BaseException:
                _end(child)
                raise
        return subprocess.CompletedProcess(command, status, _text_of(told), _text_of(errors))


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
