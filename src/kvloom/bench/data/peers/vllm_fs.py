"""vLLM's file system tier without an engine: answers JSON lines on stdin, in vLLM's own Python.

``FileSystemTierManager`` is called as its tiering manager calls it: jobs of keys and chunk numbers over a buffer in
memory, with its default number of threads.  The buffer lies in huge pages, the best case; the objects are spread over
twice as many jobs as there are threads.  The tier neither syncs nor verifies; syncing is done here and timed apart.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

JOBS = 32
HUGE = 2 << 20


class Tier:
    """One tier at a time."""

    def __init__(self) -> None:
        self._package = importlib.import_module("vllm")
        self._numpy = importlib.import_module("numpy")
        self._base = importlib.import_module("vllm.v1.kv_offload.base")
        self._jobs = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        self._fs = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
        self._tier: Any = None
        self._number = 0

    # What the methods take and give is described at ``FilePeer``.

    def version(self) -> dict[str, Any]:
        """Name and version."""
        return {"version": f"vllm {self._package.__version__}"}

    def make(self, directory: str, size: int, total: int) -> dict[str, Any]:
        """A new tier, and objects in its memory."""
        self.close()
        np, self._root, self._size = self._numpy, Path(directory), size
        memory = mmap.mmap(-1, total + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE
        self._memory = whole[start : start + total].reshape(-1, size)
        drawn = np.random.Generator(np.random.PCG64(0)).integers(0, 256, total, np.uint8)
        self._memory[:] = drawn.reshape(-1, size)
        self._sums = [hashlib.blake2b(block).digest() for block in self._memory]
        names = (hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(len(self._memory)))
        self._keys = [self._base.make_offload_key(name, 0) for name in names]
        self._start()
        return {"files": len(self._keys)}

    def _start(self) -> None:
        self._root.mkdir(exist_ok=True)
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, world_size=1, is_parallelism_agnostic=True
        )
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=None,
            model=SimpleNamespace(name="model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._tier = self._fs.FileSystemTierManager(spec, memoryview(self._memory), "fs", str(self._root))

    def store(self) -> dict[str, Any]:
        """Store everything anew, then sync it."""
        # The folders stay, as they do for an engine after its first minutes.
        for path in self._files():
            path.unlink()
        seconds = self._run(self._tier.submit_store, promotion=False)
        begun = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(_sync, self._files()))
        return {"seconds": seconds, "syncing": time.perf_counter() - begun}

    def load(self) -> dict[str, Any]:
        """Load everything into memory that was emptied."""
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        self._memory[:] = 0
        before = _device_bytes()
        seconds = self._run(self._tier.submit_load, promotion=True)
        read = _device_bytes() - before
        if any(hashlib.blake2b(block).digest() != good for block, good in zip(self._memory, self._sums, strict=True)):
            raise RuntimeError("it returned other bytes than were stored")
        return {"seconds": seconds, "device_bytes": read}

    def _run(self, submit: Any, promotion: bool) -> float:
        count = max(1, -(-len(self._keys) // JOBS))
        begun, jobs = time.perf_counter(), 0
        for first in range(0, len(self._keys), count):
            keys = self._keys[first : first + count]
            chunks = self._numpy.arange(first, first + len(keys))
            context = self._base.ReqContext(req_id=str(self._number), kv_transfer_params=None)
            submit(self._jobs.TransferJob(self._number, keys, chunks, promotion, context))
            self._number += 1
            jobs += 1
        self._tier.drain_jobs()
        done = list(self._tier.get_finished_jobs())
        seconds = time.perf_counter() - begun
        if len(done) != jobs or not all(job.success for job in done):
            raise RuntimeError(f"{sum(not job.success for job in done)} of {jobs} jobs failed")
        return seconds

    def _files(self) -> list[Path]:
        return list(self._root.rglob("*.bin"))

    def close(self) -> None:
        """Give the tier back."""
        if self._tier is not None:
            self._tier.shutdown()
        self._tier = None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.close(fd)


def _device_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    """Answer until stdin ends; what the peer itself prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tier: Tier | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            tier = tier or Tier()
            reply = getattr(tier, request.pop("do"))(**request)
        except Exception as error:  # whatever the peer raises is for the other process to report
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    if tier is not None:
        tier.close()


if __name__ == "__main__":
    main()
