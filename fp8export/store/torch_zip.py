"""torch.save archives: an uncompressed zip of one pickle and one member per storage.

Source: torch/serialization.py since 1.6.
"""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError
from ..model import LazyTensor
from .disk import read_bytes, refuse_pointer, tensor_at
from .safe_pickle import StorageRef, StoredTensor, load_torch_file

# where training scripts put the model inside a larger checkpoint, most specific first
_MODEL_KEYS = ("model_state_dict", "state_dict", "model", "module")


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, object]]:
    """Return tensors and other values of the model's state dict, by name. Only the pickle is read."""
    refuse_pointer(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if len(members) != len(archive.infolist()):
                raise CheckpointError(
                    "two members of one name", where=str(path), hint="readers differ in which they take"
                )
            pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(pickles) != 1:
                raise CheckpointError(
                    "a zip, but not made by torch.save", where=str(path), hint="expected one data.pkl inside"
                )
            if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                raise CheckpointError(
                    "compressed zip", where=str(path), hint="torch.save never compresses: save it again"
                )
            prefix = pickles[0].removesuffix("data.pkl")
            order = members.get(f"{prefix}byteorder")
            little = order is None or archive.read(order) == b"little"
            data = archive.read(pickles[0])
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"not a torch.save archive: {error}",
            where=str(path),
            hint="cut short? fetch it again. Older than torch 1.6? load and save it once with a newer torch",
        ) from error
    if not little:
        raise CheckpointError("big-endian checkpoint", where=str(path), hint="save it on a little-endian machine")

    root = load_torch_file(data, f"{path.name}::{pickles[0]}")
    state = _model_part(root)
    if state is None:
        raise CheckpointError(
            "no state dict inside", where=str(path), hint="expected torch.save(model.state_dict(), ...)"
        )
    tensors: dict[str, LazyTensor] = {}
    objects: dict[str, object] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"a state dict key that is no text: {key!r}", where=str(path), hint="save state_dict()"
            )
        found = _resolve(value, partial(_lazy, path, members, prefix, key), {})
        if isinstance(found, LazyTensor):
            tensors[key] = found
        else:
            objects[key] = found
    return tensors, objects


def _resolve(value: object, lazy: Callable[[StoredTensor], LazyTensor], seen: dict[int, object]) -> object:
    """Values that are no tensors may hold some: a framework's state in a dict, list or byte stream. `seen` makes shared
    and circular values cost one visit."""
    if id(value) in seen:
        return seen[id(value)]
    result: object = value
    if isinstance(value, io.BytesIO):
        result = value.getvalue()
    elif isinstance(value, StoredTensor):
        result = lazy(value)
    elif isinstance(value, Mapping):
        table: dict[object, object] = {}
        result = seen[id(value)] = table
        table.update((key, _resolve(item, lazy, seen)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items: list[object] = []
        result = seen[id(value)] = items
        items.extend(_resolve(item, lazy, seen) for item in value)
    seen[id(value)] = result
    return result


def _model_part(root: object) -> Mapping[object, object] | None:
    if not isinstance(root, Mapping):
        return None
    for key in _MODEL_KEYS:
        inner = root.get(key)
        if isinstance(inner, Mapping) and any(isinstance(v, StoredTensor) for v in inner.values()):
            return inner
    return root if any(isinstance(v, StoredTensor) for v in root.values()) else None


def _lazy(
    path: Path, members: Mapping[str, zipfile.ZipInfo], prefix: str, name: str, tensor: StoredTensor
) -> LazyTensor:
    origin = f"{path.name}::{name}"
    if not isinstance(tensor.storage, StorageRef):
        raise CheckpointError("the tensor has no storage", where=origin, hint="fetch the file again")
    info = members.get(f"{prefix}data/{tensor.storage.key}")
    if info is None:
        raise CheckpointError("the archive lacks this tensor's data", where=origin, hint="fetch the file again")
    sizes = (*tensor.shape, *tensor.stride, tensor.offset)
    if not all(type(n) is int and n >= 0 for n in sizes) or len(tensor.shape) != len(tensor.stride):
        raise CheckpointError("the tensor's shape is malformed", where=origin, hint="fetch the file again")
    item = tensor.dtype.itemsize
    empty = 0 in tensor.shape
    span = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
    if (tensor.offset + span) * item > info.file_size:
        raise CheckpointError("the tensor reaches past its storage", where=origin, hint="fetch the file again")
    start = _data_offset(path, info, origin) + tensor.offset * item
    if _is_contiguous(tensor.shape, tensor.stride):
        return tensor_at(path, start, tensor.shape, tensor.dtype, origin)

    def fetch(lo: int, hi: int) -> Tensor:
        raw = read_bytes(path, start, span * item, origin).view(tensor.dtype)
        return raw.as_strided(tensor.shape, tensor.stride)[lo:hi].contiguous()

    return LazyTensor(tensor.shape, tensor.dtype, origin, fetch)


def _data_offset(path: Path, info: zipfile.ZipInfo, origin: str) -> int:
    """The local header repeats the name and has extra fields of its own length (torch pads there for alignment)."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
        name = file.read(len(info.orig_filename.encode()))
    if len(head) != 30 or head[:4] != b"PK\x03\x04" or name != info.orig_filename.encode():
        raise CheckpointError("the archive is damaged", where=origin, hint="fetch the file again")
    name_length, extra_length = struct.unpack("<HH", head[26:30])
    return int(info.header_offset + 30 + name_length + extra_length)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
