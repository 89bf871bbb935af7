"""Digests of prefixes: BLAKE3 by its published vectors, and the chain that ``docs/identity.md`` specifies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core import plain_blake3 as plain

from kvloom.core.digests import LEAF_CONTEXT, LINK_CONTEXT, ROOT_CONTEXT, PrefixKeys, blake3, derive_key, prefix_digests
from kvloom.core.namespace import encode_namespace
from kvloom.errors import InputError

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "blake3_vectors.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "identity.md"
NAMESPACE = encode_namespace(b"tenant", [("lora", "sql")], b"layout")


def _pattern(length: int) -> bytes:
    return bytes(i % 251 for i in range(length))


def _plain_digests(namespace: bytes, tokens: list[int], segment: int) -> list[bytes]:
    leaf_key, link_key, link = (plain.derive_key(c, namespace) for c in (LEAF_CONTEXT, LINK_CONTEXT, ROOT_CONTEXT))
    digests = []
    for start in range(0, len(tokens), segment):
        data = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + segment])
        link = plain.keyed_hash(link_key, link + plain.keyed_hash(leaf_key, data))
        digests.append(link)
    return digests


def _digests(
    tokens: list[int], segment: int, *, namespace: bytes = NAMESPACE, after: bytes | None = None
) -> list[bytes]:
    array = np.array(tokens, dtype=np.int32)
    return [row.tobytes() for row in prefix_digests(PrefixKeys.of(namespace), array, segment, after=after)]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: str(case["length"]))
def test_published_vectors(case: dict[str, Any]) -> None:
    data, key = _pattern(case["length"]), VECTORS["key"].encode()
    assert blake3(data).hex() == case["hash"]
    assert blake3(data, key=key).hex() == case["keyed_hash"]
    assert derive_key(VECTORS["context"], data).hex() == case["derive_key"]


@pytest.mark.parametrize("length", [0, 1, 64, 65, 1024, 1025, 3073])
def test_the_plain_reference_has_the_published_vectors_too(length: int) -> None:
    (case,) = [c for c in VECTORS["cases"] if c["length"] == length]
    data = _pattern(length)
    assert plain.blake3(data).hex() == case["hash"]
    assert plain.keyed_hash(VECTORS["key"].encode(), data).hex() == case["keyed_hash"]
    assert plain.derive_key(VECTORS["context"], data).hex() == case["derive_key"]


@given(data=st.binary(max_size=5000), key=st.binary(min_size=32, max_size=32))
@settings(max_examples=40, deadline=None)
def test_any_bytes(data: bytes, key: bytes) -> None:
    assert blake3(data) == plain.blake3(data)
    assert blake3(data, key=key) == plain.keyed_hash(key, data)


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=900),
    segment=st.one_of(st.integers(1, 40), st.sampled_from([128, 255, 256, 257, 300, 512, 640])),
    namespace=st.binary(max_size=80),
)
@settings(max_examples=60, deadline=None)
def test_every_boundary_and_the_ragged_end(tokens: list[int], segment: int, namespace: bytes) -> None:
    assert _digests(tokens, segment, namespace=namespace) == _plain_digests(namespace, tokens, segment)


@pytest.mark.parametrize("segment", [16, 128])
def test_many_more_segments_than_lanes(segment: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31 - 1, 37 * segment + 5).tolist()
    assert _digests(tokens, segment) == _plain_digests(NAMESPACE, tokens, segment)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_going_on_from_a_known_boundary(cut: int) -> None:
    tokens = list(range(20 * 16 + 3))
    whole = _digests(tokens, 16)
    assert whole[cut:] == _digests(tokens[cut * 16 :], 16, after=whole[cut - 1])


def test_the_end_of_a_prompt_has_a_digest_of_its_own() -> None:
    tokens = list(range(40))
    ends = {_digests(tokens[:n], 16)[-1] for n in range(1, 41)}
    assert len(ends) == 40
    assert _digests(tokens[:32], 16)[-1] == _digests(tokens, 16)[1]  # a boundary does not depend on what follows


def test_other_namespaces_share_nothing() -> None:
    spaces = [
        encode_namespace(b"a", [], b"layout"),
        encode_namespace(b"b", [], b"layout"),
        encode_namespace(b"a", [("lora", "x")], b"layout"),
        encode_namespace(b"a", [("lora", b"x")], b"layout"),
        encode_namespace(b"a", [], b"another layout"),
    ]
    seen = [d for space in spaces for d in _digests(list(range(64)), 16, namespace=space)]
    seen += [PrefixKeys.of(space).root for space in spaces]
    assert len(set(seen)) == len(seen)


def test_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import numpy as np\n"
        "from kvloom.core.digests import PrefixKeys, prefix_digests\n"
        "from kvloom.core.namespace import encode_namespace\n"
        "keys = PrefixKeys.of(encode_namespace(b'tenant', [('lora', 'sql')], b'layout'))\n"
        "print(prefix_digests(keys, np.arange(100, dtype=np.int32), 16)[-1].tobytes().hex())\n"
    )
    seen = set()
    for seed in ("0", "1", "4711"):
        command = [sys.executable, "-c", code]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        seen.add(done.stdout.strip())
    assert seen == {_digests(list(range(100)), 16)[-1].hex()}


def test_layout_of_the_buffer_does_not_matter() -> None:
    tokens = np.arange(200, dtype=np.int32)
    keys = PrefixKeys.of(NAMESPACE)
    wanted = prefix_digests(keys, tokens, 16)
    sparse = np.zeros((200, 3), dtype=np.int32)
    sparse[:, 1] = tokens
    frozen = tokens.copy()
    frozen.flags.writeable = False
    for other in (sparse[:, 1], frozen):
        assert np.array_equal(prefix_digests(keys, other, 16), wanted)


def test_no_salt_is_readable() -> None:
    salt = b"a very secret salt of a tenant"
    keys = PrefixKeys.of(encode_namespace(salt, [], b"layout"))
    shown = repr(keys).encode() + keys.root + prefix_digests(keys, np.arange(64, dtype=np.int32), 16).tobytes()
    assert salt not in shown
    assert salt.hex().encode() not in shown


@pytest.mark.parametrize(
    ("tokens", "segment", "after", "words"),
    [
        (np.arange(4), 2, None, "int64"),
        (np.zeros((2, 2), dtype=np.int32), 2, None, "shape"),
        (np.arange(4, dtype=np.int32), 0, None, "segment of 0"),
        (np.arange(4, dtype=np.int32), 2, b"short", "32 bytes, not 5"),
    ],
)
def test_unusable_input(tokens: Any, segment: int, after: bytes | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        prefix_digests(PrefixKeys.of(NAMESPACE), tokens, segment, after=after)
    with pytest.raises(InputError, match="32 bytes"):
        blake3(b"", key=b"short")


def test_the_worked_example_of_the_specification() -> None:
    text = PAGE.read_text()
    shown = dict(re.findall(r"^(\w[\w ]*?)\s*= ([0-9a-f]{64})$", text, re.MULTILINE))
    namespace = bytes.fromhex("".join(re.findall(r"^ns \| ([0-9a-f ]+)$", text, re.MULTILINE)).replace(" ", ""))
    assert namespace == encode_namespace(b"tenant", [("lora", "sql"), ("rank", 8)], b"layout")
    tokens = np.arange(1, 11, dtype=np.int32)
    keys = PrefixKeys.of(namespace)
    first, second, end = (row.tobytes() for row in prefix_digests(keys, tokens, 4))
    assert shown == {
        "leaf key": keys.leaf.tobytes().hex(),
        "link key": keys.link.tobytes().hex(),
        "root": keys.root.hex(),
        "leaf 0": plain.keyed_hash(keys.leaf.tobytes(), tokens[:4].tobytes()).hex(),
        "digest at 4": first.hex(),
        "digest at 8": second.hex(),
        "digest at 10": end.hex(),
    }
