"""Checksums in the pass over the bytes that copies them, compiled, with the GIL released; what tiers share."""
