"""SmolLM2-135M with real weights in a hybrid layout: half of the layers see only a sliding window.

SmolLM2 is a llama, every layer of which has full attention.  Its tensors fit transformers' ``ministral``
architecture one to one, which lets each layer be sliding or full.  Which layers lose least when they see
only a window was measured one layer at a time; the first twelve and the last three lose almost nothing.
The perplexity of both layouts is shown beside the answers, so nobody has to believe this.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from kvloom.demo import weights
from kvloom.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

LAYERS = 30
WINDOW = 256
"""Tokens that a sliding layer sees, the current one included."""
SLIDING_LAYERS = (*range(12), 27, 28, 29)
CHUNK = 512


def layer_types(sliding: Sequence[int] = SLIDING_LAYERS) -> list[str]:
    """transformers' ``layer_types`` with these layers sliding and the others full."""
    return ["sliding_attention" if i in sliding else "full_attention" for i in range(LAYERS)]


def load_model(sliding: Sequence[int] = SLIDING_LAYERS, *, window: int = WINDOW) -> PreTrainedModel:
    """The model in float32 on the CPU, with these layers sliding; nothing is fetched from anywhere.

    Raises MissingExtraError when torch, transformers, gguf or the weights' package is missing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        from transformers import MinistralConfig, MinistralForCausalLM
    except ImportError:
        raise MissingExtraError("SmolLM2 needs torch and transformers; run: pip install 'kvloom[demo]'") from None

    config = MinistralConfig(
        **weights.geometry(),
        hidden_act="silu",
        tie_word_embeddings=True,
        attention_dropout=0.0,
        sliding_window=window,
        layer_types=layer_types(sliding),
        attn_implementation="sdpa",
        dtype="float32",
    )
    model: Any = MinistralForCausalLM(config)
    state = {name: torch.from_numpy(array) for name, array in weights.tensors()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    model.eval()
    return cast("PreTrainedModel", model)


def set_layout(model: PreTrainedModel, sliding: Sequence[int]) -> None:
    """Make these layers of a loaded model sliding and the others full, in place."""
    types = layer_types(sliding)
    model.config.layer_types = types
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_type = types[i]
        layer.self_attn.sliding_window = model.config.sliding_window if i in sliding else None


def perplexity(model: PreTrainedModel, token_ids: Sequence[int]) -> float:
    """exp of the mean next-token loss over ``token_ids`` in one forward without a cache."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.tensor([list(token_ids)])
    loss = 0.0
    with torch.inference_mode():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        for start in range(0, ids.shape[1] - 1, CHUNK):  # logits of all positions at once would be large
            stop = min(start + CHUNK, ids.shape[1] - 1)
            logits = model.lm_head(hidden[start:stop])
            loss += float(cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum"))
    return float(torch.tensor(loss / (ids.shape[1] - 1)).exp())
