"""``attach``: one model, one manager, one arena; sessions are opened on the engine that it returns."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
import transformers
from transformers import PreTrainedModel

from kvloom.adapters.cold import ROOM_PATIENCE, ColdTier
from kvloom.adapters.store_source import StoreSource
from kvloom.adapters.transformers.block_table import CLOSED
from kvloom.adapters.transformers.cache import LayerPlan
from kvloom.adapters.transformers.device import Arena, make_arena
from kvloom.adapters.transformers.hooks import ForwardHooks
from kvloom.adapters.transformers.interrupts import whole
from kvloom.adapters.transformers.layers import refuse
from kvloom.adapters.transformers.probe import probe
from kvloom.adapters.transformers.recovering import Passage, Recoverer, Replay, replay_of
from kvloom.adapters.transformers.runner import Runner
from kvloom.adapters.transformers.session import Session
from kvloom.adapters.transformers.state import places
from kvloom.adapters.transformers.tokens import to_tokens
from kvloom.adapters.transformers.weights import device_name, weights_digest
from kvloom.config import Device
from kvloom.errors import CapacityError, ConfigError, InputError, SequenceError, UnsupportedError
from kvloom.eviction import EvictionPolicy
from kvloom.manager import Manager
from kvloom.manager.events import Watch
from kvloom.manager.inputs import checked_keys, grade_of
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.watched import WatchedManager
from kvloom.plan import CopyPlan
from kvloom.spec.from_config import spec_from_config
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.disk import DiskStore
from kvloom.types import Grade, Int32Array

ExtraKey = tuple[str, str | bytes | int]
T = TypeVar("T")
Names = tuple[bytes, tuple[ExtraKey, ...]]
"""Salt and extra keys of a namespace."""


class Engine:
    """A model whose cached state kvloom manages.  Made by :func:`attach`; belongs to the thread that made it.

    A session that is dropped without ``close`` is closed at the next call of any session.

    Attributes:
        model: the attached model.
        spec: its KV cache groups, as measured.
        manager: decides what is reused and what goes.
        arena: every slot of every group, one storage.
        layers: how the layers of a cache are made.
        hooks: what sees the forwards of the model.
        cold: the disk store behind the arena, or None.
        recoverer: chooses and goes the way back before a prompt is opened; None: the device's own hit is all.
    """

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, manager: Manager, store: DiskStore | None = None
    ) -> None:
        self.model = model
        self.spec = spec
        self.manager = manager
        self.arena: Arena = make_arena(manager.geometry, spec, model.device)
        self.layers = LayerPlan(model.config, places(spec))
        self.hooks = ForwardHooks(model)
        self.cold = None if store is None else ColdTier(manager, self.arena, store)
        self.recoverer: Recoverer | None = None
        self._dropped: list[CachedSequence] = []
        self._weights = 0
        self._known_weights = ("", "")

    def open(
        self,
        token_ids: Any,
        *,
        salt: bytes = b"",
        extra_keys: SequenceOf[ExtraKey] = (),
        floor: Grade | str = Grade.FAITHFUL,
    ) -> Session:
        """Find, lease and restore the longest cached prefix of a prompt.

        Args:
            token_ids: the prompt: list, NumPy array or torch tensor of integers, ``[n]`` or ``[1, n]``.
            salt: tenant; different salts never share anything.
            extra_keys: what else must agree, as (name, value) pairs (LoRA adapter, ...).
            floor: worst grade of reused state that this session accepts: a ``Grade`` or its name.

        Raises:
            InputError: ids that are empty, not integers, outside the vocabulary or more than the model allows; a
                salt, key or floor of another type.
            CapacityError: the prompt cannot fit, or not beside the open sessions.
            SequenceError: the engine is closed.
            UnsupportedError: the model is in training mode.
            WrongThreadError: another thread made the engine.
        """
        if self.hooks.removed:
            raise SequenceError("the engine is closed; attach the model again")
        tokens, keys, worst = self.checked(token_ids), checked_keys(extra_keys), grade_of(floor)
        if self.model.training:
            raise UnsupportedError("the model is in training mode, so its state is random; call model.eval() first")
        self.close_dropped()
        seen = self.seen()
        keys = (*keys, ("kvloom.abi", self._abi(seen)))
        passage = None
        if isinstance(salt, bytes):
            if self.recoverer is not None:
                passage = self.recoverer.recover(tokens, salt, keys, worst)
            elif self.cold is not None:
                self._restore(tokens, (salt, keys), worst)
        return self._opened(tokens, (salt, keys), worst, seen, passage)

    @whole
    def _restore(self, tokens: Int32Array, names: Names, floor: Grade) -> None:
        if self.cold is not None:
            self.cold.restore(tokens, *names, floor)

    @whole
    def _opened(self, tokens: Int32Array, names: Names, floor: Grade, seen: str, passage: Passage | None) -> Session:
        salt, keys = names
        sequence = self.with_room(lambda: self.manager.open(tokens, salt=salt, extra_keys=keys, floor=floor))
        try:
            self.run(sequence.restore)
            runner = self.track(Runner(self, sequence, names, seen, tokens, passage))
            runner.arrive()
            return Session(runner, tokens)
        except BaseException:
            sequence.close()
            raise

    @property
    def scratch_bytes(self) -> int:
        """Host memory beside the arena that what is read back for attention takes now (0 on an accelerator)."""
        return 0 if self.arena.scratch is None else self.arena.scratch.n_bytes

    def checked(self, token_ids: Any) -> Int32Array:
        """Token ids as int32 ``[n]``; InputError names what is wrong."""
        return to_tokens(token_ids, vocab_size=self.spec.vocab_size, max_positions=self.spec.max_positions)

    def run(self, plan: CopyPlan) -> None:
        """Run the copies of a plan and report them done; report them not done if that fails."""
        if not len(plan):
            return
        try:
            self.arena.run(plan)
        except BaseException:
            self.manager.abandon(plan)
            raise
        self.manager.complete(plan)

    def with_room(self, ask: Callable[[], T]) -> T:
        """Ask the manager for something; when there is no room, once more when what is being stored has let go."""
        try:
            return ask()
        except CapacityError as error:
            if self.cold is None or not self.cold.waiting or error.never_fits:
                raise
            self.cold.flush(ROOM_PATIENCE)
        return ask()

    def keep_cold(self, sequence: CachedSequence, names: Names, made_by: str) -> None:
        """Store the end of a sequence that has just been kept resumable, where there is a store.

        ``made_by``: what ``seen`` said when the sequence was opened.  If the model is another one by now, what it
        computed is nobody's state, and that must not outlive the process.
        """
        if self.cold is not None:
            if made_by == self.seen():
                self.cold.keep(sequence, *names)
            else:
                self.cold.stats.not_stored["model changed"] += 1

    def track(self, runner: Runner) -> Runner:
        """Remember to close the sequence of ``runner`` if it is dropped without ``close``."""
        weakref.finalize(runner, self._dropped.append, runner.sequence).atexit = False
        return runner

    @whole
    def close_dropped(self) -> None:
        """Close the sequences of sessions and copied caches that nobody refers to any more."""
        while self._dropped:
            self._dropped.pop().close()

    def weights_changed(self) -> None:
        """Say that the weights were changed in a way that torch does not count: through ``.data``, by a foreign kernel.

        Everything cached so far misses from now on, for good; it is evicted as its room is needed.  Changes by
        ordinary operations, and swapped tensors, are noticed without it.  Sessions that are open go on with the
        state that they have, which the old weights made: close them before the change.

        Raises WrongThreadError from another thread than the one that made the engine.
        """
        self.manager.enter()
        self._weights += 1

    def require_open(self) -> None:
        """SequenceError once the engine is closed."""
        if self.hooks.removed:
            raise SequenceError(CLOSED)

    def close(self) -> None:
        """Take the hooks off the model.  Open sessions cannot go on, only be closed.  Closing twice is harmless.

        Waits for what is being stored; what sessions that are closed afterwards have computed is not stored.
        """
        self.hooks.remove()
        self.close_dropped()
        if self.cold is not None:
            self.cold.close()
            self.cold = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse("copying an engine", "attach the model again, or fork a session")

    def __copy__(self) -> NoReturn:
        refuse("copying an engine", "attach the model again, or fork a session")

    def seen(self) -> str:
        """What may change under a running engine and then makes other state.

        Weights are told apart by where they lie and by torch's version counters, so swapped, merged and edited ones
        are noticed, except for writes through ``.data`` that keep the storage, which torch does not count: for those
        there is :meth:`weights_changed`.
        """
        weights = hashlib.blake2b(digest_size=16)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            version = 0 if tensor.is_inference() else tensor._version
            weights.update(struct.pack("<QQ", tensor.data_ptr(), version))
        parts = (m for m in self.model.modules() if m is not self.model)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in parts)
        config = self.model.config.get_text_config(decoder=True)
        settings = (
            self.model.config._attn_implementation,
            config._experts_implementation,
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
        )
        return f"settings={settings} hooks={hooks} weights={self._weights} {weights.hexdigest()}"

    def _abi(self, seen: str) -> str:
        """What ``seen`` says, as it becomes part of every key: with a store, the weights by their bytes."""
        if self.cold is None:
            return seen
        settings, _, weights = seen.partition(" weights=")
        if self._known_weights[0] != weights:
            self._known_weights = weights, weights_digest(self.model)
        return f"{settings} device={device_name(self.model.device)} weights={self._known_weights[1]}"


def attach(
    model: PreTrainedModel,
    *,
    device: int | str = "512MiB",
    segment: int | None = None,
    block_size: int = 128,
    snapshot_interval: int | None = None,
    max_sequences: int = 64,
    policy: EvictionPolicy | str = "cost",
    watch: Watch | None = None,
    store: DiskStore | None = None,
    replay: Replay | str = Replay.OFF,
) -> Engine:
    """Let kvloom manage the cached state of ``model``.

    The model's own code is not changed: two forward hooks see calls that carry a session's cache, and do nothing
    for others.  A few tokens are run once to check the spec against the state that the model really makes.

    Args:
        model: a causal language model on one device, in eval mode.
        device: cap of the arena, in bytes or as ``"512MiB"``.  On a CPU it is host memory, touched when used.
        segment: tokens per segment, a multiple of the LCM; also the canonical chunk.
        block_size: tokens per block of ratio-1 groups.
        snapshot_interval: tokens between recurrent snapshots, a multiple of the segment.
        max_sequences: sessions that may be open at once.
        policy: eviction policy: a name, or an ``EvictionPolicy``.
        store: a disk store that outlives the process: prefixes are looked for there too, and ends of prompts and of
            responses are kept there.  The engine closes it.  Not together with ``watch``.
        replay: ``auto``: a prompt goes on in the way that is expected to be fastest: computing, loading, or making lost
            windows and tails again by running a few tokens over the compressed state that is still there, which gives
            ``faithful`` state.  Not together with ``watch``.
        watch: told every call that changes the manager, such as a ``kvloom.replay.recorder.Recorder``.

    Raises:
        SpecError: the model keeps state that is not understood.
        ConfigError: an option is out of range, or more than the machine has.
        CapacityError: the cap is smaller than the smallest request.
        InputError: ``model`` is no transformers model.
        UnsupportedError: training mode, a model on several devices or without weights, one that makes no logits, or
            one that transformers itself cannot run on a cache; a store together with a watch.
    """
    _check_model(model)
    if model.training:
        raise UnsupportedError("the model is in training mode, so its state is random; call model.eval() first")
    if watch is not None and store is not None:
        raise UnsupportedError("what comes from a store cannot be recorded; give attach either a store or a watch")
    if store is not None and not isinstance(store, DiskStore):
        raise InputError(f"store must be a DiskStore, as DiskStore.open makes it, not {type(store).__name__}")
    way = replay_of(replay)
    if watch is not None and way is not Replay.OFF:
        raise UnsupportedError("a replay cannot be recorded; give attach either replay or a watch")
    config = model.config.get_text_config(decoder=True)
    dtype = str(model.dtype).removeprefix("torch.")
    tier = Device(device)
    options = {"block_size": block_size, "segment": segment, "snapshot_interval": snapshot_interval}
    spec = probe(model, spec_from_config(config, dtype=dtype, **options))  # type: ignore[arg-type]
    versions = (("torch", torch.__version__), ("transformers", transformers.__version__))
    spec = replace(spec, identity=tuple(sorted((*spec.identity, *versions))))
    make = Manager if watch is None else partial(WatchedManager, watch=watch)
    try:
        manager = make(spec, [tier], policy=policy, max_sequences=max_sequences, thread_id=threading.get_ident)
        engine = Engine(model, spec, manager, store)
    except (MemoryError, OSError) as error:
        raise ConfigError(
            f"this machine cannot give a device tier of {tier.size} bytes with {max_sequences} sequences ({error}); "
            "use a smaller size, or fewer sequences"
        ) from error
    if way is Replay.AUTO:
        source = None if store is None else StoreSource(manager, engine.arena, store, time.perf_counter)
        engine.recoverer = Recoverer(engine, time.perf_counter, source)
    return engine


def _check_model(model: object) -> None:
    """Refuse what is no causal language model on one device; nothing of it has run yet."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"attach takes a loaded transformers model, not {type(model).__name__}; "
            "use AutoModelForCausalLM.from_pretrained(...).eval()"
        )
    if isinstance(model, PreTrainedModel) and not model.can_generate():
        raise UnsupportedError(f"{type(model).__name__} makes no logits of next tokens; attach a causal language model")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}), but kvloom has one arena; "
            "move the model to one device"
        )
    if any(device.type == "meta" for device in devices):
        raise UnsupportedError("the model is on the device meta, so it has no weights; load it to a real device")
