"""``attach``: a model, a manager and an arena become an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import PreTrainedModel

from kvloom.adapters.transformers.engine import Engine
from kvloom.adapters.transformers.probe import probe
from kvloom.adapters.transformers.recovering import Recoverer, Replay, replay_of
from kvloom.config import Device, exact_size, parse_size
from kvloom.errors import ConfigError, InputError, UnsupportedError
from kvloom.eviction import EvictionPolicy
from kvloom.manager import Manager
from kvloom.manager.events import Watch
from kvloom.manager.watched import WatchedManager
from kvloom.spec.from_config import spec_from_config
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.transfer.options import TransferOptions

_OF_A_TIER = ("name", "durable", "lookup", "read", "publish", "touch", "clear", "usage", "close")


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
    host: int | str | None = None,
    store: DiskStore | None = None,
    tiers: Sequence[Tier] = (),
    transfers: TransferOptions | None = None,
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
        watch: told every call that changes the manager, such as a ``kvloom.replay.recorder.Recorder``.
        host: cap of a host memory tier behind the device, in bytes or as ``"4GiB"`` (pinned when the device is a GPU).
        store: a disk store that outlives the process, behind the host tier.
        tiers: other cold tiers, nearest first, behind these two; see ``docs/tiers.md``.
        transfers: when and how state moves between the tiers.
        replay: ``auto``: a prompt goes on in the way that is expected to be fastest: computing, loading, or making lost
            windows and tails again by running a few tokens over the compressed state that is still there, which gives
            ``faithful`` state; ``off``: whatever a tier has is loaded.  Not together with ``watch``.

    Prefixes are looked for in all tiers, and ends of prompts and of responses are kept there.  The engine closes the
    tiers.  They cannot be used together with ``watch``.

    Raises:
        SpecError: the model keeps state that is not understood.
        ConfigError: an option is out of range, or more than the machine has.
        CapacityError: the cap is smaller than the smallest request.
        InputError: ``model`` is no transformers model, ``store`` no DiskStore, or something in ``tiers`` no tier.
        UnsupportedError: training mode, a model on several devices or without weights, one that makes no logits, or
            one that transformers itself cannot run on a cache; tiers together with a watch.
    """
    _check_model(model)
    if model.training:
        raise UnsupportedError("the model is in training mode, so its state is random; call model.eval() first")
    if watch is not None and (store is not None or host is not None or tiers):
        raise UnsupportedError("what comes from a colder tier cannot be recorded; give attach either tiers or a watch")
    if store is not None and not isinstance(store, DiskStore):
        raise InputError(f"store must be a DiskStore, as DiskStore.open makes it, not {type(store).__name__}")
    if store is not None and store.closed:
        raise InputError(f"store {store.directory} is closed, as an engine closes its own; open it again for this one")
    _check_tiers(tiers, store)
    if transfers is not None and not isinstance(transfers, TransferOptions):
        raise ConfigError(
            f"transfers must be TransferOptions, not {type(transfers).__name__}; write "
            "transfers=TransferOptions(gpu_watermark=0.8), imported from kvloom.transfer.options"
        )
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
        behind = [] if host is None else [_host_tier(host, model.device)]
        engine = Engine(model, spec, manager, [*behind, *([] if store is None else [store]), *tiers], transfers)
    except (MemoryError, OSError) as error:
        raise ConfigError(
            f"device: this machine cannot give a tier of {exact_size(tier.size)} with {max_sequences} sequences "
            f"({error}); use a smaller size, or fewer sequences"
        ) from error
    if way is Replay.AUTO:
        engine.recoverer = Recoverer(engine, time.perf_counter)
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


def _check_tiers(tiers: object, store: DiskStore | None) -> None:
    """Refuse what is no list of cold tiers; only whether they have what every tier has is looked at."""
    if not isinstance(tiers, Sequence):
        raise InputError(f"tiers must be a list of tiers, nearest first, not {type(tiers).__name__}; write tiers=[...]")
    for tier in tiers:
        lacking = [name for name in _OF_A_TIER if not hasattr(tier, name)]
        if lacking:
            raise InputError(
                f"tiers: {type(tier).__name__} is no cold tier, it lacks {', '.join(lacking)}; "
                "kvloom.tiers.contract.Tier says what one has"
            )
    if len({id(tier) for tier in (*tiers, store)}) <= len(tiers):
        raise InputError("tiers: the same tier is there twice; name it once, a DiskStore as store or in tiers")


def _host_tier(size: int | str, device: torch.device) -> Tier:
    try:
        capacity = parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"host: {error}") from None
    try:
        return HostStore(capacity, pinned if device.type == "cuda" else None)
    except (MemoryError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"host: this machine cannot give a tier of {exact_size(capacity)} ({reason}); use a smaller size"
        ) from error


def pinned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Host memory that a GPU can copy to and from on its own, uint8 ``[n_bytes]``."""
    try:
        memory: npt.NDArray[np.uint8] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:  # as torch says that there is not so much
        raise MemoryError(str(error).splitlines()[0]) from error
    return memory
