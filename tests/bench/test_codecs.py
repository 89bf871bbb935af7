"""The codec benchmark: every cell is there, says what it measured, and torch's side does the same work."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvloom.bench import codecs
from kvloom.kernels.measure import kv_like, sample_group
from kvloom.kernels.reference import values_of

torch = pytest.importorskip("torch")


def test_rows() -> None:
    said: list[tuple[str, int, int]] = []
    rows = codecs.codec_rows(lambda *step: said.append(step), layers=(1,))
    assert [(row.what, row.dtype) for row in rows] == [
        (what, dtype)
        for pair in (("fp8: quantise", "fp8: dequantise"), ("lossless: split and zstd", "lossless: zstd and merge"))
        for dtype in codecs.DTYPES
        for what in pair
    ]
    assert [done for _, done, _ in said] == list(range(7))
    assert {total for _, _, total in said} == {6}
    for row in rows:
        assert row.total_bytes == sample_group(row.dtype, 1).slot_bytes
        assert row.gbps > 0
        assert row.memcpy_gbps > 0
        assert row.compression > 1
        assert (row.speedup is None) == (row.torch_gbps is None) == row.what.startswith("lossless")
        assert json.loads(json.dumps(row.to_json()))["dtype"] == row.dtype


def test_torchs_side_computes_the_same_thing() -> None:
    slot = kv_like(sample_group(layers=1))
    quantise, dequantise = codecs._peer(slot, "bfloat16", torch)
    codes, scale = quantise()
    assert codes.dtype is torch.float8_e4m3fn
    assert tuple(scale.shape) == (len(slot) // 256, 1)
    back = dequantise().contiguous().view(torch.uint16).numpy().ravel()
    values, returned = values_of(slot.view(np.uint16), "bfloat16"), values_of(back, "bfloat16")
    assert np.abs(values - returned).max() < np.abs(values).max() / 16


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with codecs._one_thread() as module:
        assert module.get_num_threads() == 1
    assert torch.get_num_threads() == before
