"""Nouns of output: every name, shape, dtype and byte offset, known before one weight byte is read."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .model import DTYPES

# (tensor name, first row, rows) -> None: where a job hands over its bytes, in any order, possibly twice
Sink = Callable[[str, int, Tensor], None]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one index along dimension 0; a scalar is one row."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape[1:]:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.row_bytes * (self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True)
class Job:
    """One fused set or one plain tensor. `run` streams its rows into a sink and returns what it observed."""

    entries: tuple[Entry, ...]
    run: Callable[[Sink], list[Record]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class OutFile:
    name: str
    jobs: tuple[Job, ...]

    @property
    def entries(self) -> list[Entry]:
        """Sorted as safetensors' own writer does: by type, wide ones first, then by name."""
        order = {name: rank for rank, name in enumerate(DTYPES)}
        return sorted((e for j in self.jobs for e in j.entries), key=lambda e: (order[e.dtype], e.name))

    def header(self) -> tuple[bytes, dict[str, int]]:
        """Return the safetensors header, length prefix included, and each tensor's offset in the file."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts: dict[str, int] = {}
        for entry in self.entries:
            starts[entry.name] = end
            table[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            end += entry.nbytes
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        prefix = len(text).to_bytes(8, "little") + text
        return prefix, {name: len(prefix) + start for name, start in starts.items()}

    @property
    def nbytes(self) -> int:
        return len(self.header()[0]) + sum(job.nbytes for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Layout:
    files: tuple[OutFile, ...]
    copies: Mapping[str, Path]
    finish: Callable[[list[Record]], Mapping[str, bytes]]  # sidecars, once every job has reported
    fingerprint: str  # of everything that decides the bytes
    resume_key: str  # the same and when the source was modified: half-done work is only taken up from the same files

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files) + sum(path.stat().st_size for path in self.copies.values())


def fingerprint(files: tuple[OutFile, ...], copies: Mapping[str, Path], options: Mapping[str, Any]) -> str:
    """Name a result by everything that decides its bytes: the layout, the copied files' content, the options."""
    parts = [[f.name, [[e.name, e.shape, e.dtype] for e in f.entries]] for f in files]
    copied = {}
    for name, path in copies.items():
        with open(path, "rb") as file:
            copied[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest([parts, copied, options])


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
