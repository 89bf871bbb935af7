"""kvloom for Hugging Face transformers: ``attach`` a model, ``open`` sessions, go on in ``generate``."""

from kvloom.adapters.transformers.attaching import attach
from kvloom.adapters.transformers.cache import PagedCache
from kvloom.adapters.transformers.engine import Engine
from kvloom.adapters.transformers.session import Session
from kvloom.adapters.transformers.state import layer_state

__all__ = ["Engine", "PagedCache", "Session", "attach", "layer_state"]
