"""The ``kvloom`` command."""

from __future__ import annotations
