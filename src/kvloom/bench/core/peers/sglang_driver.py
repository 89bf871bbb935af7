"""SGLang's unified prefix tree (Rust core) and allocators without a model, called as its scheduler calls them.

Runs in SGLang's own environment: torch 2.13.0 (CPU), sglang 0.5.23 without its dependencies, and what importing it
needs.  Modules that only a GPU needs are absent there and stand empty for the import.  Pages of an extend come from the
allocators' own ``alloc``, since the kernel that picks them needs a GPU; everything else is SGLang's own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import types
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PAGE = 16
_FIRST = ("AutoProcessor", "AutoImageProcessor", "AutoModel")
"""Of transformers: they look for packages themselves, so they come before anything stands empty for SGLang."""


def make_driver(clock: Any, served: Any, configs: Any) -> Sglang:
    """The driver; imports SGLang."""
    spec = importlib.util.spec_from_file_location("kvloom_absent", Path(__file__).with_name("absent.py"))
    assert spec is not None
    assert spec.loader is not None
    absent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(absent)
    sys.meta_path.append(absent.Absent())
    return Sglang(clock, served, configs)


@dataclass(eq=False)
class _Request:
    """What the tree and the allocators read of a scheduler's request."""

    full_untruncated_fill_ids: Any
    kv: Any
    rid: str = "r"
    lock: Any = None
    last_node: Any = None
    extra_key: Any = None
    cache_salt: Any = None
    priority: int = 0
    session_id: Any = None
    session: Any = None
    kv_rotation_base: Any = None
    swa_branching_seqlen: Any = None
    mamba_branching_seqlen: Any = None
    mamba_last_track_seqlen: Any = None
    decode_batch_idx: int = 0
    seqlen: int = 0
    origin_input_ids: Any = field(init=False)

    def __post_init__(self) -> None:
        self.origin_input_ids = self.full_untruncated_fill_ids

    def finished(self) -> bool:
        return False

    def get_fill_ids(self) -> Any:
        return self.full_untruncated_fill_ids


class Sglang:
    """``UnifiedRadixCache`` with the Rust core for one config at a time."""

    granule = PAGE

    def __init__(self, clock: Any, served: Any, configs: Any) -> None:
        self._clock, self._served, self._configs = clock, served, configs
        logging.disable(logging.CRITICAL)
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        transformers = importlib.import_module("transformers")
        for name in _FIRST:
            getattr(transformers, name)
        base = "sglang.srt.mem_cache."
        importlib.import_module(base + "rust_tree_core.extension")
        self._params = importlib.import_module(base + "base_prefix_cache")
        self._keys = importlib.import_module(base + "radix_cache")
        self._tree = importlib.import_module(base + "unified_radix_cache")
        self._init = importlib.import_module(base + "cache_init_params").CacheInitParams
        self._kinds = importlib.import_module(base + "unified_cache.component_type").ComponentType
        self._rows = importlib.import_module(base + "memory_pool").ReqToTokenPool
        self._allocation = importlib.import_module(base + "allocation")
        self._batches = importlib.import_module("sglang.srt.managers.schedule_batch")
        self._package = importlib.import_module("sglang")
        self._batch: Any = None
        self._cache: Any = None
        self._pool: Any = None
        self._allocator: Any = None

    def version(self) -> str:
        return f"sglang {self._package.__version__}"

    def supports(self, config: str, case: str) -> bool:
        return config in ("full", "gptoss")

    # ---------------------------------------------------------------- the manager

    def make(self, plan: Any) -> None:
        self._cache = self._pool = self._allocator = self._batch = None
        groups = self._configs[plan.config]
        blocks = plan.blocks()
        tokens = (plan.objects + blocks[0]) * PAGE
        kinds = self._kinds
        self._row = plan.sequences  # below are those of the decode batch
        self._pool = self._rows(plan.sequences, plan.row + PAGE, "cpu", False)
        named: dict[str, Any] = {"tree_components": (kinds.FULL,)}
        bfloat16 = self._torch.bfloat16
        self._windowed = len(groups) > 1
        if self._windowed:
            allocators = importlib.import_module("sglang.srt.mem_cache.allocator.swa")
            window_tokens = (plan.objects + blocks[1]) * PAGE
            self._allocator = allocators.SWATokenToKVPoolAllocator(
                tokens, window_tokens, PAGE, bfloat16, "cpu", self._no_memory(), False
            )
            named = {"tree_components": (kinds.FULL, kinds.SWA), "sliding_window_size": groups[1].window}
        else:
            allocators = importlib.import_module("sglang.srt.mem_cache.allocator.paged")
            self._allocator = allocators.PagedTokenToKVPoolAllocator(tokens, PAGE, bfloat16, "cpu", None, False)
        self._cache = self._tree.UnifiedRadixCache(
            self._init(
                disable=False,
                req_to_token_pool=self._pool,
                token_to_kv_pool_allocator=self._allocator,
                page_size=PAGE,
                tree_core_backend="rust",
                **named,
            )
        )

    def _no_memory(self) -> Any:
        """A pool that keeps the mapping between the two index spaces and has no tensors."""
        base = importlib.import_module("sglang.srt.mem_cache.base_swa_memory_pool").BaseSWAKVPool
        unused = {name: lambda _self, *_a, **_k: None for name in base.__abstractmethods__}

        class NoMemory(type("Unused", (base,), unused)):  # type: ignore[misc]
            def __init__(self) -> None:
                self.full_kv_pool = self.swa_kv_pool = self.swa_req_ring_size = None

            def register_mapping(self, mapping: Any) -> None:
                self.full_to_swa_index_mapping = mapping

            def translate_loc_from_full_to_swa(self, indices: Any) -> Any:
                return self.full_to_swa_index_mapping[indices]

        return NoMemory()

    # ---------------------------------------------------------------- requests

    def keep(self, ids: Any) -> Any:
        return array("q", ids.astype("int64").tobytes())

    def _find(self, ids: Any, request: Any) -> int:
        """Match all but the last token, lock, and write the row."""
        cache = self._cache
        key = self._keys.RadixKey(ids, limit=len(ids) - 1)
        match = cache.match_prefix(self._params.MatchPrefixParams(key=key))
        node = match.last_device_node
        indices = cache.path_device_indices(node)[: match.device_prefix_len]
        request.lock, request.last_node = cache.lock(node), node
        request.kv.cache_protected_len = len(indices)
        self._pool.req_to_token[request.kv.req_pool_idx][: len(indices)] = indices
        return len(indices)

    def _allocate(self, row: Any, start: int, end: int) -> None:
        need = -(-end // PAGE) * PAGE - -(-start // PAGE) * PAGE
        if not need:
            return
        allocator = self._allocator
        allocator.evict_to_free_tokens(self._cache, need)
        if self._windowed:
            pages = allocator.full_attn_allocator.alloc(need)
            allocator.set_full_to_swa_mapping(pages, allocator.swa_attn_allocator.alloc(need))
        else:
            pages = allocator.alloc(need)
        row[start:end] = pages[: end - start]

    def serve(self, prompt: Any, chunk: int) -> Any:
        clock, total = self._clock, len(prompt)
        request = _Request(prompt, self._batches.ReqKvInfo(req_pool_idx=self._row))
        row = self._pool.req_to_token[self._row]
        began = clock()
        done = reused = self._find(prompt, request)
        at = clock()
        parts = {"lookup": at - began, "allocate": 0, "commit": 0, "free": 0}
        while done < total:
            end = min(total, done + (chunk or total))
            self._allocate(row, done, end)
            request.kv.kv_allocated_len = request.kv.kv_committed_len = end
            ids = prompt if end == total else prompt[:end]
            request.full_untruncated_fill_ids = request.origin_input_ids = ids
            allocated = clock()
            self._cache.checkpoint_into_tree(request, up_to=end)
            committed = clock()
            parts["allocate"] += allocated - at
            parts["commit"] += committed - allocated
            done, at = end, committed
        self._cache.unlock(request.lock)
        parts["free"] = clock() - at
        return self._served(reused, parts)

    def look(self, prompt: Any) -> Any:
        request = _Request(prompt, self._batches.ReqKvInfo(req_pool_idx=self._row))
        began = self._clock()
        reused = self._find(prompt, request)
        self._cache.unlock(request.lock)
        return self._served(reused, {"lookup": self._clock() - began})

    def cached(self) -> int:
        allocator = self._allocator
        if not self._windowed:
            return int((allocator.size - allocator.available_size()) // PAGE)
        used = allocator.size_full - allocator.full_available_size()
        return int((used + allocator.size_swa - allocator.swa_available_size()) // PAGE)

    # ---------------------------------------------------------------- decode

    def begin(self, prompts: Any) -> None:
        t, requests = self._torch, []
        for slot, ids in enumerate(prompts, start=1):
            request = _Request(ids, self._batches.ReqKvInfo(req_pool_idx=slot))
            reused = self._find(ids, request)
            self._allocate(self._pool.req_to_token[slot], reused, len(ids))
            request.kv.kv_allocated_len = request.kv.kv_committed_len = request.seqlen = len(ids)
            self._cache.checkpoint_into_tree(request, up_to=len(ids))
            requests.append(request)
        lengths = t.tensor([len(ids) for ids in prompts])
        batch = SimpleNamespace(
            reqs=requests,
            tree_cache=self._cache,
            token_to_kv_pool_allocator=self._allocator,
            req_to_token_pool=self._pool,
            req_pool_indices=t.arange(1, len(requests) + 1),
            req_pool_indices_cpu=t.arange(1, len(requests) + 1),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False),
            model_config=SimpleNamespace(is_encoder_decoder=False),
            forward_iter=0,
        )
        schedule = self._batches.ScheduleBatch
        for name in ("maybe_evict_swa", "_swa_eviction_trigger", "_evict_swa"):
            setattr(batch, name, types.MethodType(getattr(schedule, name), batch))
        self._batch = batch

    def step(self) -> Any:
        batch = self._batch
        began = self._clock()
        self._allocation.alloc_for_decode_default(batch, 1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        for request in batch.reqs:
            request.seqlen += 1
            request.decode_batch_idx += 1
        return self._served(0, {"step": self._clock() - began})

    def end(self) -> None:
        """Free what the answers hold, then let go of the prompts."""
        for slot, request in enumerate(self._batch.reqs, start=1):
            kept = request.kv.cache_protected_len
            tail = self._pool.req_to_token[slot, kept : request.seqlen].to(self._torch.int64)
            self._allocator.free(tail)
            self._cache.unlock(request.lock)
        self._batch = None

    # ---------------------------------------------------------------- the rest

    def clear(self, blocks: Any) -> None:
        self._allocator.evict_to_free_tokens(self._cache, max(blocks) * PAGE)

    def evict(self, objects: int) -> Any:
        began = self._clock()
        self._cache.evict(self._params.EvictParams(num_tokens=objects * PAGE))
        return self._served(0, {"evict": self._clock() - began})

    def forget_windows(self) -> None:
        self._cache.evict(self._params.EvictParams(num_tokens=0, swa_num_tokens=self._allocator.size_swa))

    def disagree(self, ids: Any) -> None:
        raise NotImplementedError("SGLang has at most one window group here")

    def convert(self, ids: list[int]) -> Any:
        began = self._clock()
        array("q", ids)
        return self._served(0, {"convert": self._clock() - began})

    def digest(self, ids: Any) -> Any:
        return None  # it compares tokens
