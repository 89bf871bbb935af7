"""A peer that keeps objects in files, driven in its own Python, beside the disk store."""

from __future__ import annotations

from pathlib import Path

from kvloom.bench.core.sides import PeerName, PeerProcess

NAMES = ("vllm",)


class FilePeer:
    """A peer's tier.  Raises PeerError with what it said last.

    ``driver``: the file that drives it; by default the one that ships for its name.
    """

    def __init__(self, peer: PeerName, driver: Path | None = None) -> None:
        self.name = f"{peer.name} fs"
        self.files = 0
        driver = driver or Path(__file__).parent / "peers" / f"{peer.name}_fs.py"
        self._process = PeerProcess(peer, (driver,))

    def version(self) -> str:
        """Name and version; this is where a peer that is not installed fails."""
        return self._process.version()

    def make(self, directory: Path, size: int, total: int) -> None:
        """Have a tier in a new folder, and ``total`` bytes of objects of ``size`` in its memory."""
        directory.mkdir()
        request = {"do": "make", "directory": str(directory), "size": size, "total": total}
        self.files = int(self._process.ask(request)["files"])

    def store(self) -> tuple[float, float]:
        """Store all objects anew: seconds that it took, and seconds that syncing the files took afterwards."""
        reply = self._process.ask({"do": "store"})
        return float(reply["seconds"]), float(reply["syncing"])

    def load(self) -> tuple[float, int]:
        """Load all objects with nothing in the page cache: seconds, and bytes that came from the device."""
        reply = self._process.ask({"do": "load"})
        return float(reply["seconds"]), int(reply["device_bytes"])

    def close(self) -> None:
        """End the process."""
        self._process.close()
