"""The disk store beside plain 4 MiB O_DIRECT transfers, in one run: ``make bench-disk DIR=...``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kvloom.bench.disk import run_all


def main() -> None:
    """Print a line for every cell; what is written to the directory is removed again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the disk to measure")
    directory = parser.parse_args().directory
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvloom-bench-") as place:
        for row in run_all(Path(place), lambda *_: None):
            size = f"{row.object_bytes >> 10} KiB"
            print(f"{row.what:8} {size:>9} {row.gbps:6.2f} GB/s of {row.limit_gbps:5.2f}: {row.ratio:.2f}")


if __name__ == "__main__":
    main()
