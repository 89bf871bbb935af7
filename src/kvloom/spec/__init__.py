"""Describing a model's cached state: KV cache groups, their geometry, bytes and page size."""

from kvloom.spec.footprint import peak_bytes, peak_slots
from kvloom.spec.from_config import spec_from_config
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec

__all__ = ["GroupSpec", "ModelSpec", "TensorSpec", "peak_bytes", "peak_slots", "spec_from_config"]
