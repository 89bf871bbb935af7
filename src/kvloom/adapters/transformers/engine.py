"""``Engine``: one model, one manager, one arena, and the tiers behind it; sessions are opened on it."""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers.block_table import CLOSED
from kvloom.adapters.transformers.cache import LayerPlan
from kvloom.adapters.transformers.device import Arena, make_arena
from kvloom.adapters.transformers.hooks import ForwardHooks
from kvloom.adapters.transformers.interrupts import interrupted, whole
from kvloom.adapters.transformers.layers import refuse
from kvloom.adapters.transformers.recovering import Passage, Recoverer
from kvloom.adapters.transformers.runner import Runner
from kvloom.adapters.transformers.session import Session
from kvloom.adapters.transformers.state import places
from kvloom.adapters.transformers.tokens import to_tokens
from kvloom.adapters.transformers.weights import device_name, weights_digest
from kvloom.errors import ArrivalError, CapacityError, InputError, SequenceError, UnsupportedError
from kvloom.manager import Manager
from kvloom.manager.inputs import checked_keys, grade_of
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import CopyPlan, Limit
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.contract import Tier
from kvloom.transfer.arriving import Arrival
from kvloom.transfer.hierarchy import Hierarchy
from kvloom.transfer.options import Restoring, TransferOptions
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
        cold: the tiers behind the arena, or None; None once the engine is closed.
        recoverer: chooses and goes the way back before a prompt is opened; None: whatever a tier has is loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        manager: Manager,
        tiers: SequenceOf[Tier] = (),
        options: TransferOptions | None = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self.manager = manager
        self.arena: Arena = make_arena(manager.geometry, spec, model.device)
        self.layers = LayerPlan(model.config, places(spec))
        self.hooks = ForwardHooks(model)
        self.cold: Hierarchy | None = None
        if tiers:
            self.cold = Hierarchy(manager, self.arena, tiers, options, hurried=interrupted)
        self.recoverer: Recoverer | None = None
        self._dropped: list[CachedSequence] = []
        self._weights = 0
        self._known_weights = ("", "")
        self._last_abi = ""

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
        keys = (*keys, ("kvloom.abi", self._present(seen)))
        passage = None
        if self.recoverer is not None and isinstance(salt, bytes):
            passage = self.recoverer.recover(tokens, salt, keys, worst)
        return Session(*self._opened(tokens, (salt, keys), worst, seen, passage))

    @whole
    def _opened(
        self, tokens: Int32Array, names: Names, floor: Grade, seen: str, passage: Passage | None
    ) -> tuple[Runner, Int32Array, tuple[Limit, ...]]:
        """A sequence that is closed in the end even when an interrupt loses what this returns."""
        sequence, arrival, limits = self.lease(tokens, names, floor)
        try:
            runner = self.track(Runner(self, sequence, names, seen, tokens, passage, arrival))
            runner.arrive()
        except BaseException:
            sequence.close()
            if self.cold is not None:
                self.cold.give_up()
            raise
        return runner, tokens, limits

    @whole
    def lease(
        self, tokens: Int32Array, names: Names, floor: Grade, restoring: Restoring | None = None
    ) -> tuple[CachedSequence, Arrival | None, tuple[Limit, ...]]:
        """Bring a prefix from colder tiers, lease it and run the first copies.

        ``restoring``: instead of that of the transfer options.  Also returns what is still arriving of the prefix, and
        what tiers have that is not good enough.
        """
        cold, (salt, keys) = self.cold, names
        if cold is not None and isinstance(salt, bytes):
            if self.recoverer is None or len(tokens) < 2:
                cold.restore(tokens, salt, keys, floor, restoring)
            elif restoring is not None:  # again: what arrives now is somebody else's, and nobody would wait for it
                cold.settle()
        try:
            sequence = self.with_room(lambda: self.manager.open(tokens, salt=salt, extra_keys=keys, floor=floor))
            try:
                self.run(sequence.restore)
            except ArrivalError:
                sequence.close()
                return self.lease(tokens, names, floor, Restoring.WHOLE)
            except BaseException:
                sequence.close()
                raise
        except BaseException:
            if cold is not None:
                cold.give_up()
            raise
        return sequence, None if cold is None else cold.arriving, () if cold is None else tuple(cold.limits)

    def begin_forward(self, arrival: Arrival | None) -> None:
        """The model begins to compute, on a prefix that may still be ``arrival``: what else moves keeps to its pace."""
        if self.cold is not None:
            self.cold.pace.begin(() if arrival is None else arrival.load.jobs)

    def end_forward(self) -> None:
        """It has ended, or failed.  Harmless when none was under way."""
        if self.cold is not None:
            self.cold.pace.end()

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
            if self.cold is not None:
                self.cold.fence(plan)
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
            self.cold.make_room()
        return ask()

    @whole
    def prefetch(
        self,
        token_ids: Any,
        *,
        salt: bytes = b"",
        extra_keys: SequenceOf[ExtraKey] = (),
        floor: Grade | str = Grade.FAITHFUL,
    ) -> bool:
        """Begin to bring the cached prefix of a prompt that waits to the device; whether something is under way.

        Open the prompt with the same arguments when its turn comes.  What was brought holds its room until then, or
        until somebody else needs it, or ``cancel_prefetch`` says that it will not come.  Without colder tiers, and
        when too many are under way, it does nothing.

        Raises InputError, SequenceError and WrongThreadError like ``open``.
        """
        tokens, names, worst = self._asked(token_ids, salt, extra_keys, floor)
        return self.cold is not None and self.cold.prefetch(tokens, *names, worst)

    @whole
    def cancel_prefetch(self, token_ids: Any, *, salt: bytes = b"", extra_keys: SequenceOf[ExtraKey] = ()) -> None:
        """Say that a prompt given to ``prefetch`` will not be opened.  Harmless for one that is not known."""
        tokens, names, _ = self._asked(token_ids, salt, extra_keys, Grade.FAITHFUL)
        if self.cold is not None:
            self.cold.forget_ahead(tokens, *names)

    def _asked(
        self, token_ids: Any, salt: bytes, extra_keys: SequenceOf[ExtraKey], floor: Grade | str
    ) -> tuple[Int32Array, Names, Grade]:
        """What was asked for, checked, with the layout of the moment in the keys."""
        self.require_open()
        if not isinstance(salt, bytes):
            raise InputError(f"salt must be bytes, not {type(salt).__name__}; encode it first")
        return self.checked(token_ids), (salt, self.keys(extra_keys)), grade_of(floor)

    def keys(self, extra_keys: SequenceOf[ExtraKey] = ()) -> tuple[ExtraKey, ...]:
        """The extra keys of a namespace, with the layout of the moment."""
        return (*checked_keys(extra_keys), ("kvloom.abi", self._present(self.seen())))

    def keep_cold(self, sequence: CachedSequence, names: Names, made_by: str) -> None:
        """Store the end of a sequence that has just been kept resumable, where there is a store.

        ``made_by``: what ``seen`` said when the sequence was opened.  If the model is another one by now, what it
        computed is nobody's state, and that must not outlive the process.
        """
        if self.cold is not None:
            if made_by == self.seen():
                self.cold.keep(sequence, *names)
            else:
                self.cold.stats.not_kept["model changed"] += 1

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

    def _present(self, seen: str) -> str:
        """``_abi``; what was fetched ahead for the model as it was before is given up: nobody can ask for it again."""
        abi = self._abi(seen)
        if self._last_abi != abi and self.cold is not None:
            self.cold.forget_all_ahead()
        self._last_abi = abi
        return abi

    def _abi(self, seen: str) -> str:
        """What ``seen`` says, as a part of every key: where it outlives the process, the weights by their bytes."""
        if self.cold is None or not self.cold.outlives:
            return seen
        settings, _, weights = seen.partition(" weights=")
        if self._known_weights[0] != weights:
            self._known_weights = weights, weights_digest(self.model)
        return f"{settings} device={device_name(self.model.device)} weights={self._known_weights[1]}"
