"""How bytes lie on disk: a path in, names to lazy tensors out. Nothing here knows what a scale means."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RequestError
from ..model import LazyTensor, Note
from . import safetensors_dir, torch_zip
from .disk import is_plain_name, is_weight_file, read_json

__all__ = ["Store", "open_store"]


@dataclass(frozen=True, slots=True)
class Store:
    path: Path
    container: str
    tensors: Mapping[str, LazyTensor]
    objects: Mapping[str, object]  # what a pickle held besides tensors: bytes, None, numbers
    config: Mapping[str, Any]
    assets: Mapping[str, Path]  # files to copy as they are, by relative name
    skipped_files: Mapping[str, str]
    identity: str
    modified: tuple[int, ...]
    notes: tuple[Note, ...]


# tried in this order, the first that finds its files wins: safetensors before pickles when both are there
_CONTAINERS = (
    ("safetensors", "model.safetensors", safetensors_dir.read_file),
    ("torch zip", "pytorch_model.bin", torch_zip.read_file),
)
_CONTRADICTS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_LONE_FILES = {
    ".safetensors": ("safetensors", safetensors_dir.read_file),
    ".bin": ("torch zip", torch_zip.read_file),
    ".pt": ("torch zip", torch_zip.read_file),
    ".pth": ("torch zip", torch_zip.read_file),
}


def open_store(path: Path, hf_config: Path | None = None) -> Store:
    """Open a checkpoint folder or a lone weight file. Reads headers only.

    `hf_config` is a folder with config.json and tokenizer files; by default those beside the weights are taken.
    Raises CheckpointError for anything missing, damaged or ambiguous.
    """
    try:
        return _open(path, hf_config)
    except OSError as error:
        raise CheckpointError(
            f"cannot read: {error.strerror or error}", where=str(error.filename or path), hint="check its permissions"
        ) from error


def _open(path: Path, hf_config: Path | None) -> Store:
    if not path.exists():
        raise CheckpointError("no such file or folder", where=str(path), hint="check the spelling of the path")
    if hf_config is not None and not hf_config.is_dir():
        raise RequestError("no such folder", where=f"--hf-config {hf_config}", hint="name the folder with config.json")
    if path.is_file():
        kind = _LONE_FILES.get(path.suffix)
        if kind is None:
            raise CheckpointError(
                f"{path.suffix or 'a file without suffix'} is not a checkpoint format I read",
                where=str(path),
                hint=f"give a folder, or a file ending in {', '.join(_LONE_FILES)}",
            )
        container, read = kind
        files: tuple[Path, ...] = (path,)
        indexed: dict[str, str] | None = None
    elif path.is_dir():
        container, read, files, indexed = _find_weights(path)
    else:
        raise CheckpointError("neither a file nor a folder", where=str(path), hint="give a checkpoint folder")

    tensors: dict[str, LazyTensor] = {}
    objects: dict[str, object] = {}
    owner: dict[str, Path] = {}
    notes: list[Note] = []
    for file in files:
        found, others = read(file)
        for name in (*found, *others):
            if name in owner:
                raise CheckpointError(
                    "one tensor lies in two shards",
                    where=f"{file}::{name} and {owner[name]}::{name}",
                    hint="remove the stale shard, or write the checkpoint again",
                )
            owner[name] = file
        tensors.update(found)
        objects.update(others)
    if indexed is not None:
        notes += _check_index(path, indexed, owner)

    folder = hf_config or (path if path.is_dir() else path.parent)
    assets, skipped = _assets(folder, lone=path.is_file() and hf_config is None)
    config_file = folder / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    for name in {file.name for file in files}:
        skipped.pop(name, None)
    modified = tuple(file.stat().st_mtime_ns for file in files)
    return Store(path, container, tensors, objects, config, assets, skipped, _identity(files), modified, tuple(notes))


def _find_weights(folder: Path) -> tuple[str, Any, tuple[Path, ...], dict[str, str] | None]:
    for container, name, read in _CONTAINERS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            weight_map = _weight_map(index)
            shards = sorted(set(weight_map.values()))
            for shard in shards:
                if not (folder / shard).is_file():
                    raise CheckpointError(
                        "the index names a shard that is not there",
                        where=f"{index}: {shard}",
                        hint="fetch the missing file, or remove the index if the checkpoint is one file",
                    )
            return container, read, tuple(folder / shard for shard in shards), weight_map
        if (folder / name).is_file():
            return container, read, (folder / name,), None
    lone = sorted(p for p in folder.iterdir() if p.suffix in _LONE_FILES)
    if len(lone) == 1:
        container, read = _LONE_FILES[lone[0].suffix]
        return container, read, (lone[0],), None
    raise CheckpointError(
        "no checkpoint found" if not lone else "several weight files and no index",
        where=str(folder) + (": " + ", ".join(p.name for p in lone[:5]) if lone else ""),
        hint="expected model.safetensors, pytorch_model.bin or one of them with .index.json; or name one file",
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", where=str(index), hint="write the checkpoint again")
    for name, shard in weight_map.items():
        # a plain file name in the same folder: no separators of any system, no parent, no drive
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(
                "the index points outside its folder",
                where=f"{index}: {name} -> {shard!r}",
                hint="an index may only name files beside it; do not trust this checkpoint",
            )
    return weight_map


def _check_index(folder: Path, indexed: dict[str, str], owner: dict[str, Path]) -> list[Note]:
    for name, shard in indexed.items():
        if name not in owner:
            raise CheckpointError(
                "the index names a tensor that its shard does not hold",
                where=f"{folder / shard}::{name}",
                hint="the shard is from another save or cut short: fetch it again",
            )
        if owner[name].name != shard:
            raise CheckpointError(
                "the index places a tensor in the wrong shard",
                where=f"{folder / shard}::{name}, found in {owner[name].name}",
                hint="write the index again from the shards",
            )
    return [
        Note("a tensor lies in a shard but not in the index: carried over", f"{file.name}::{name}")
        for name, file in owner.items()
        if name not in indexed
    ]


def _assets(folder: Path, lone: bool) -> tuple[dict[str, Path], dict[str, str]]:
    """Everything beside the weights, recursively; weight containers are listed, not copied. Beside a lone file only
    what a Hugging Face folder is known to hold: its neighbours may be anything."""
    assets: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    names = ("config.json", "generation_config.json", "tokenizer", "special_tokens", "vocab", "merges", "chat_template")
    for parent, folders, files in os.walk(folder):
        folders[:] = [] if lone else sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if lone and not name.startswith(names):
                continue
            if not path.is_file():
                skipped[relative] = "not a file: a broken link or a device"
            elif is_weight_file(path):
                skipped[relative] = "holds weights or points to them: a server might load it beside the export"
            elif name in _CONTRADICTS:
                skipped[relative] = "describes another quantisation, which servers would believe"
            elif not name.startswith("."):
                assets[relative] = path
    assets.pop("config.json", None)
    return assets, skipped


def _identity(files: tuple[Path, ...]) -> str:
    """Tell two checkpoints apart without reading them: names, sizes and 64 evenly spaced pages of each file."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as handle:
            for i in range(64):
                handle.seek(max(0, (size - 4096) * i // 63))
                digest.update(handle.read(4096))
    return digest.hexdigest()
