"""What state on disk is only found by: the same weights, on the same sort of device."""

from __future__ import annotations

import hashlib

import torch

_PIECE = 64 << 20


def weights_digest(model: torch.nn.Module) -> str:
    """BLAKE2b-256, in hex, over names, dtypes, shapes and bytes of all parameters and buffers.

    Reads every weight once, about a second for each GB.
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        head = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
        digest.update(len(head).to_bytes(8, "big") + head)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _PIECE):
            digest.update(memoryview(flat[start : start + _PIECE].cpu().numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """What computes: another one rounds in another way."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
