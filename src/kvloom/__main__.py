"""``python -m kvloom``."""

from __future__ import annotations

from kvloom.cli import main

if __name__ == "__main__":
    main()
