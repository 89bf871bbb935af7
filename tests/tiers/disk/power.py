"""Loss of power without a device: writes and syncs are recorded, and states are made that a disk may be left in.

The recording is strace's, so SQLite's own calls are in it.  A file's data are safe after a sync of the file, a name
after a sync of its directory; of what is not safe any part may be there, in any order, in whole pages.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096
CALLS = (
    "openat,close,pwrite64,write,fallocate,fdatasync,fsync,ftruncate,unlink,unlinkat,rename,renameat,renameat2,mkdir"
)
LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")
SAID = "said"


@dataclass(frozen=True)
class Event:
    """``what``: write, sync, truncate, create, unlink, rename, said; of a file by its path when it was opened."""

    what: str
    path: str
    offset: int = 0
    data: bytes = b""
    target: str = ""
    file: int = -1


def record(code: str, directory: Path, log: Path, strace: str) -> list[Event]:
    """Run Python code with the directory as its argument; what it writes to descriptor 1 is ``said``."""
    command = [strace, "-f", "-qq", "-xx", "-s", str(64 << 20), "-o", str(log), "-e", f"trace={CALLS}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(directory)],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(parse(joined(log.read_text().splitlines()), str(directory)))


def joined(lines: Iterable[str]) -> list[str]:
    """Calls that were interrupted by another thread's, in the order in which they ended."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
        elif "resumed>" in line:
            whole.append(begun.pop(thread) + line.split("resumed>", 1)[1])
        else:
            whole.append(line)
    return whole


def _text(quoted: str) -> bytes:
    return bytes.fromhex(quoted.replace("\\x", ""))


def parse(lines: list[str], root: str) -> list[Event]:
    """The events below ``root``."""
    names: dict[int, tuple[str, int]] = {}
    events, files = [], 0
    for line in lines:
        found = LINE.match(line)
        if found is None or int(found[4]) < 0:
            continue
        call, arguments, value = found[2], found[3], int(found[4])
        strings = [_text(quoted) for quoted in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]
        if call == "openat":
            path = strings[0].decode()
            if path.startswith(root):
                files += 1
                names[value] = path, files
                if "O_CREAT" in arguments:
                    events.append(Event("create", path))
            continue
        fd = int(arguments.split(",")[0]) if arguments[0].isdigit() else -1
        if call == "close":
            names.pop(fd, None)
        elif call == "write" and fd == 1:
            events += [Event(SAID, strings[0].decode().strip())]
        elif call in {"unlink", "unlinkat"} and strings[0].decode().startswith(root):
            events.append(Event("unlink", strings[0].decode()))
        elif call.startswith("rename") and strings[0].decode().startswith(root):
            events.append(Event("rename", strings[0].decode(), target=strings[1].decode()))
        elif call == "mkdir" and strings[0].decode().startswith(root):
            events.append(Event("mkdir", strings[0].decode()))
        elif fd in names and not names[fd][0].endswith("-shm"):
            path = names[fd][0]
            if call == "pwrite64":
                events.append(Event("write", path, int(arguments.rsplit(", ", 1)[1]), strings[0][:value]))
            elif call == "write":
                events.append(Event("write", path, -1, strings[0][:value]))
            elif call == "fallocate":
                # Nothing is written, but the file is as long as that from now on.
                events.append(Event("write", path, sum(int(part) for part in arguments.split(", ")[2:])))
            elif call in {"fdatasync", "fsync"}:
                events.append(Event("sync", path))
            elif call == "ftruncate":
                events.append(Event("truncate", path, int(arguments.rsplit(", ", 1)[1])))
    return events


@dataclass
class _File:
    safe: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)

    def apply(self, data: bytearray, change: tuple[int, bytes | None], pages: set[int] | None = None) -> None:
        offset, new = change
        if new is None:
            del data[offset:]
            data.extend(bytes(offset - len(data)))
            return
        data.extend(bytes(max(0, offset - len(data))) if not new else b"")
        for at in range(0, len(new), PAGE):
            if pages is None or at // PAGE in pages:
                part = new[at : at + PAGE]
                data.extend(bytes(max(0, offset + at + len(part) - len(data))))
                data[offset + at : offset + at + len(part)] = part


Keep = str
"""``none`` of what is not safe, ``all`` of it, ``some`` of it, or all but that of one class of files."""
CLASSES = (".extent", "-wal", ".sqlite", "KVLOOM")


def leave(events: list[Event], until: int, keep: Keep, directory: Path, root: str, rng: random.Random) -> None:
    """Make the state that a loss of power after ``until`` events may leave."""
    files: dict[int, _File] = {}
    now: dict[str, int] = {}
    safe: dict[str, int] = {}
    dirs, count = {root}, 0
    for event in events[:until]:
        if event.what == "mkdir":
            dirs.add(event.path)
        elif event.what == "create" and event.path not in now:
            count += 1
            now[event.path], files[count] = count, _File()
        elif event.what == "unlink":
            now.pop(event.path, None)
        elif event.what == "rename":
            now[event.target] = now.pop(event.path)
        elif event.what == "sync" and event.path in dirs:
            below = {path: file for path, file in now.items() if str(Path(path).parent) == event.path}
            safe = {path: file for path, file in safe.items() if str(Path(path).parent) != event.path} | below
        elif event.what == "sync" and event.path in now:
            file = files[now[event.path]]
            for change in file.waiting:
                file.apply(file.safe, change)
            file.waiting.clear()
        elif event.what in {"write", "truncate"} and event.path in now:
            file = files[now[event.path]]
            end = len(file.safe) + sum(len(data or b"") for _, data in file.waiting)
            offset = end if event.offset < 0 else event.offset
            file.waiting.append((offset, event.data if event.what == "write" else None))
    lost_class = keep.removeprefix("not ") if keep.startswith("not ") else None
    names = now if keep == "all" or lost_class else safe if keep == "none" else rng.choice([now, safe])
    for made in sorted(dirs):
        (directory / Path(made).relative_to(root)).mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for path, number in names.items():
        file, data = files[number], bytearray(files[number].safe)
        for change in file.waiting:
            whole = keep == "all" or (lost_class is not None and not path.endswith(lost_class))
            if whole:
                file.apply(data, change)
            elif keep == "some" and rng.random() < 0.5:
                size = 1 + len(change[1] or b"") // PAGE
                file.apply(data, change, {page for page in range(size) if rng.random() < 0.6})
        (directory / Path(path).relative_to(root)).write_bytes(data)
