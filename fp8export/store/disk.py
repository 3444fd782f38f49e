"""Positioned reads of files that may be cut short, replaced or never fetched."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..model import LazyTensor

_LFS_POINTER = b"version https://git-lfs"
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp", ".pkl", ".npz"),
    ".index.json",
)


def is_weight_file(path: Path) -> bool:
    """By suffix; `.bin` is only counted when its content is a torch file or a pointer to one, raw data is an asset."""
    if path.name.endswith(_WEIGHT_SUFFIXES):
        return True
    if path.suffix != ".bin":
        return False
    with open(path, "rb") as file:
        head = file.read(len(_LFS_POINTER))
    return head.startswith((b"PK\x03\x04", b"\x80\x02", _LFS_POINTER))


def is_plain_name(name: str) -> bool:
    """Tell whether a name stays in its folder on every system: no separator, no drive, no parent."""
    return (
        0 < len(name.encode(errors="replace")) < 256
        and name not in (".", "..")
        and not any(c in name for c in "/\\:\0")
    )


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError when the file is a Git LFS pointer in place of the data."""
    with open(path, "rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                "this is a Git LFS pointer, not the file itself",
                where=str(path),
                hint="run `git lfs pull` in that folder",
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    refuse_pointer(path)
    return parse_object(path.read_bytes(), str(path))


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Duplicate keys are refused: readers disagree on which one counts."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("duplicate keys")
        return table

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}", where=where, hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError("expected a JSON object", where=where, hint="fetch the file again")
    return value


def read_bytes(path: Path, offset: int, length: int, origin: str) -> Tensor:
    """Return uint8 [length]. Reads instead of mapping: a file that shrinks under a mapping kills the process."""
    out = torch.empty(length, dtype=torch.uint8)
    view = memoryview(out.numpy().data)
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < length:
                count = file.readinto(view[done:])
                if not count:
                    break
                done += count
    except OSError as error:
        raise CheckpointError(
            f"cannot read: {error.strerror}", where=origin, hint="check the disk and the mount"
        ) from error
    if done != length:
        raise CheckpointError(
            f"the file ends {length - done} bytes too early", where=origin, hint="it was cut short: fetch it again"
        )
    return out


def tensor_at(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, origin: str) -> LazyTensor:
    """A contiguous tensor whose first byte lies at `offset`."""
    row_bytes = dtype.itemsize
    for size in shape[1:]:
        row_bytes *= size

    def fetch(lo: int, hi: int) -> Tensor:
        raw = read_bytes(path, offset + lo * row_bytes, (hi - lo) * row_bytes, origin)
        return raw.view(dtype).reshape((hi - lo, *shape[1:]) if shape else ())

    return LazyTensor(shape, dtype, origin, fetch)
