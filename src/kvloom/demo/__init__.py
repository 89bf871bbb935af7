"""What ``kvloom demo`` shows: a real hybrid model answering questions about a long document."""

from __future__ import annotations
