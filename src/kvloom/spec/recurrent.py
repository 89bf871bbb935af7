"""Shapes of the state of recurrent layers, as transformers' ``LinearAttentionLayer`` stores it.

All tensors are C-contiguous without the batch axis, whatever the length of the first chunk (probed
for every family here; the tests repeat it).  A convolution state has the dtype of the activations,
a recurrent state is float32 always.
"""

from __future__ import annotations

from collections.abc import Callable

from kvloom.errors import SpecError
from kvloom.spec.config_view import ConfigView
from kvloom.spec.model_spec import TensorSpec

RecurrentShapes = Callable[[ConfigView, str], tuple[TensorSpec, ...]]
"""(config of the layer, activation dtype) -> its state tensors."""


def _states(conv: tuple[int, int], recurrent: tuple[int, int, int], dtype: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("conv_states.0", conv, dtype),
        TensorSpec("recurrent_states.0", recurrent, "float32"),
    )


def gated_delta(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Gated delta net (Qwen3-Next, Qwen3.5): one convolution over q, k and v; state [v heads, k dim, v dim]."""
    key_dim, value_dim = view.integer("linear_key_head_dim"), view.integer("linear_value_head_dim")
    value_heads = view.integer("linear_num_value_heads")
    channels = 2 * view.integer("linear_num_key_heads") * key_dim + value_heads * value_dim
    return _states((channels, view.integer("linear_conv_kernel_dim")), (value_heads, key_dim, value_dim), dtype)


def kimi_delta(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Kimi delta attention: q, k and v have the same heads; state [heads, dim, dim]."""
    defaults = {
        "head_dim": view.get("linear_head_dim"),
        "num_heads": view.get("linear_num_heads"),
        "short_conv_kernel_size": view.get("linear_conv_kernel_dim"),
    }
    nested = ConfigView(view.get("linear_attn_config") or {}, defaults)
    dim, heads = nested.integer("head_dim"), nested.integer("num_heads")
    return _states((3 * heads * dim, nested.integer("short_conv_kernel_size")), (heads, dim, dim), dtype)


def short_conv(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """LFM2/LFM3 gated short convolution: the last ``conv_L_cache`` inputs, no recurrent state."""
    return (TensorSpec("conv_states.0", (view.integer("hidden_size"), view.integer("conv_L_cache")), dtype),)


def mamba2(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Mamba 2 whose width is ``mamba_expand * hidden_size`` (Granite 4, Bamba)."""
    return _mamba2(view, dtype, view.integer("mamba_expand") * view.integer("hidden_size"))


def mamba2_own_width(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Mamba 2 whose width is ``mamba_d_ssm``, when it is given (Falcon-H1)."""
    if view.get("mamba_d_ssm") is None:
        return mamba2(view, dtype)
    return _mamba2(view, dtype, view.integer("mamba_d_ssm"))


def mamba2_nemotron(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Mamba 2 with Nemotron-H's names; its width is heads times head size."""
    if view.get("mamba_ssm_cache_dtype", "float32") != "float32":
        raise SpecError(f"nemotron_h: mamba_ssm_cache_dtype {view.get('mamba_ssm_cache_dtype')!r}; float32 is known")
    heads, head_dim = view.integer("mamba_num_heads"), view.integer("mamba_head_dim")
    state = view.integer("ssm_state_size")
    channels = heads * head_dim + 2 * view.integer("n_groups") * state
    return _states((channels, view.integer("conv_kernel")), (heads, head_dim, state), dtype)


def mamba2_zamba(view: ConfigView, dtype: str) -> tuple[TensorSpec, ...]:
    """Mamba 2 with Zamba 2's names."""
    heads, state = view.integer("n_mamba_heads"), view.integer("mamba_d_state")
    width = view.integer("mamba_expand") * view.integer("hidden_size")
    channels = width + 2 * view.integer("mamba_ngroups") * state
    return _states((channels, view.integer("mamba_d_conv")), (heads, width // heads, state), dtype)


def _mamba2(view: ConfigView, dtype: str, width: int) -> tuple[TensorSpec, ...]:
    heads, state = view.integer("mamba_n_heads"), view.integer("mamba_d_state")
    head_dim = width // heads if view.get("mamba_d_head") == "auto" else view.integer("mamba_d_head")
    if head_dim * heads != width:
        raise SpecError(f"{view.model_type}: {heads} Mamba heads of {head_dim} do not make the width {width}")
    channels = width + 2 * view.integer("mamba_n_groups") * state
    return _states((channels, view.integer("mamba_d_conv")), (heads, head_dim, state), dtype)
