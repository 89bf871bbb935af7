"""Replay of production traces: the real manager, without tensors, beside the exact offline optimum."""
