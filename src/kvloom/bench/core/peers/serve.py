"""Answers JSON lines on stdin with one peer, in the peer's own Python: ``python -I serve.py SCENARIO.py DRIVER.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    """The module in a file, without its package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server:
    """One driver, and the world it has made last."""

    def __init__(self, scenario: str, driver: str) -> None:
        self._scenario = load(scenario)
        self._driver = load(driver).make_driver(time.thread_time_ns, self._scenario.Served, self._scenario.CONFIGS)
        self._world: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        do = request["do"]
        if do == "version":
            return {"version": self._driver.version()}
        if do == "supports":
            return {"supports": self._driver.supports(request["config"], request["case"])}
        if do == "make":
            if self._world is not None:
                self._world.close()
            self._world = None
            plan = self._scenario.Plan(**{**request["plan"], "lengths": tuple(request["plan"]["lengths"])})
            self._world = self._scenario.World(self._driver, plan)
            return {"objects": self._world.objects}
        served = self._world.run(request["case"], request["tokens"], request["detail"], request["count"])
        return {"served": [asdict(s) for s in served]}


def main(scenario: str, driver: str) -> None:
    """Answer until stdin ends; what the peer itself prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server: Server | None = None
    for line in sys.stdin:
        try:
            server = server or Server(scenario, driver)
            reply = server.answer(json.loads(line))
        except Exception as error:  # whatever the peer raises is for the other process to report
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
