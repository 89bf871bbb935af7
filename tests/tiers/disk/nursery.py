"""Starts workers at once: a process that has everything imported forks (``python -m tests.tiers.disk.nursery LOG``).

It has one thread and no store open.  Being their parent, it also ends them and tells how they ended.  What they print
goes to the descriptor ``LOG``.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from tests.tiers.disk.singles import environment
from tests.tiers.disk.worker import ends

ROOT = Path(__file__).parents[3]
WAIT, WAITS = 0.002, 60_000
"""Seconds between two looks at a process that is to end, and how many looks; what is stopped meanwhile does not age."""


class Nursery:
    """Workers of one herd.  Not thread-safe."""

    def __init__(self, log: IO[str], seed: int) -> None:
        command = [sys.executable, "-m", "tests.tiers.disk.nursery", str(log.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            pass_fds=[log.fileno()],
            env=environment(seed),
            cwd=ROOT,
        )

    def start(self, directory: Path, seed: int, steps: int, plan: str, *, fresh: bool = False) -> int:
        """A worker's process id, and a reader's where ``steps`` is 0.

        ``fresh``: an interpreter of its own, with another hash seed: nothing may depend on it (D12).  Interrupts are
        not heard until everything is imported.
        """
        return self._ask("fresh" if fresh else "fork", str(directory), seed, steps, plan)

    def ended(self, pid: int) -> int | None:
        """The exit code of a worker; None while it runs."""
        code = self._ask("ended", pid)
        return None if code == RUNNING else code

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal, and do not wait."""
        self._ask("send", pid, int(number))

    def wait(self, pid: int) -> int:
        """Wait for the end of a worker; its exit code, or the negative number of the signal that ended it."""
        code = self._ask("wait", pid)
        assert code != RUNNING, f"process {pid} does not end"
        return code

    def close(self) -> None:
        """Kill those that are left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(shlex.join(str(word) for word in words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery ended"
        return int(line)


RUNNING = 1 << 16
"""Instead of an exit code."""


class Server:
    """The process itself."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._running: set[int] = set()

    def serve(self) -> None:
        """Until nobody asks any more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        calls = {"fork": self.fork, "fresh": self.fresh, "ended": self.ended, "send": self.send, "wait": self.wait}
        try:
            for line in sys.stdin:
                word, *rest = shlex.split(line)
                print(calls[word](*rest), flush=True)
        finally:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def fork(self, directory: str, seed: str, steps: str, plan: str) -> int:
        """A copy of this process becomes the worker."""
        assert threading.active_count() == 1
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(0)
                os.dup2(self._log, 1)
                os.dup2(self._log, 2)
                code = ends(directory, int(seed), int(steps), plan)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self._running.add(pid)
        return pid

    def fresh(self, directory: str, seed: str, steps: str, plan: str) -> int:
        """Another interpreter does."""
        command = [sys.executable, "-m", "tests.tiers.disk.worker", directory, seed, steps, plan]
        actions = [(os.POSIX_SPAWN_DUP2, self._log, 1), (os.POSIX_SPAWN_DUP2, self._log, 2)]
        pid = os.posix_spawn(sys.executable, command, environment(int(seed)), file_actions=actions)
        self._running.add(pid)
        return pid

    def ended(self, pid: str) -> int:
        """The exit code, or ``RUNNING``."""
        found, status = os.waitpid(int(pid), os.WNOHANG)
        if not found:
            return RUNNING
        self._running.remove(found)
        return os.waitstatus_to_exitcode(status)

    def send(self, pid: str, number: str) -> int:
        """Send a signal."""
        os.kill(int(pid), int(number))
        return 0

    def wait(self, pid: str) -> int:
        """The exit code, or ``RUNNING`` after a long time."""
        for _ in range(WAITS):
            code = self.ended(pid)
            if code != RUNNING:
                return code
            time.sleep(WAIT)
        return RUNNING


if __name__ == "__main__":
    Server(int(sys.argv[1])).serve()
