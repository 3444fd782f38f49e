"""The only door through which a pickle enters. It knows exact names; anything else is refused before it is built.

Nothing that a pickle names is ever imported: each allowed name maps to a value given here, and recipe classes map to
inert stand-ins that only remember what they were given.
"""

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, UnsafePickleError

_LIMIT = 1 << 30
_RECIPES = "transformer_engine.common.recipe"


class Inert:
    """Stands for an object of a framework: keeps constructor arguments and state, does nothing."""

    def __new__(cls, *args: object) -> "Inert":
        self = object.__new__(cls)
        self.args = args
        self.state = {}
        return self

    def __init__(self, *args: object) -> None:
        self.args: tuple[Any, ...]
        self.state: dict[str, Any]

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.state = state


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor described by a torch file's pickle: where it lies in which storage, not its bytes."""

    storage: "StorageRef"
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StorageRef:
    key: str
    dtype: torch.dtype
    numel: int


def _inert(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"__module__": module})


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Protocol 2 writes bytes as an encoded string; other codecs would import modules."""
    if encoding != "latin1":
        raise UnsafePickleError(f"the pickle asks for the codec {encoding!r}")
    return text.encode("latin1")


def _load_legacy(data: bytes) -> object:
    """torch pickles each tensor as a whole torch.save stream and would load it without limits."""
    return _torch_load(data, "")  # the door adds where


def _torch_load(data: bytes, origin: str) -> object:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name:
            raise _refused(name[1], origin) from error
        raise CheckpointError("damaged torch data", where=origin, hint="fetch the checkpoint again") from error
    except Exception as error:  # torch's own parser raises whatever its damaged input provokes
        raise CheckpointError(
            f"damaged torch data: {error}", where=origin, hint="fetch the checkpoint again"
        ) from error


def _refused(name: str, origin: str) -> UnsafePickleError:
    return UnsafePickleError(
        f"the pickle names {name}, which is outside the allow-list; nothing was executed",
        where=origin,
        hint="a training checkpoint has no need of it: do not load this file with other tools either",
    )


def _as_tensor(
    storage: StorageRef, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), storage.dtype)


def _as_typed_tensor(
    storage: StorageRef,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: object,
    _hooks: object,
    dtype: torch.dtype,
    *_: object,
) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), dtype)


def _parameter(data: object, *_: object) -> object:
    return data


_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_COMMON: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("_codecs", "encode"): _latin1,
}
# transformer_engine/common/recipe/__init__.py, 2.0 to 2.20; Megatron core 0.8 to 0.19 pickles its own subclass
_TE: dict[tuple[str, str], object] = {
    (module, name): _inert(module, name)
    for module, names in {
        _RECIPES: (
            *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
            *("CustomRecipe", "Format", "_FormatHelper", "MMParams", "QParams"),
        ),
        "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
        "megatron.core.transformer.custom_layers.transformer_engine": ("TEDelayedScaling",),
    }.items()
    for name in names
}
_EXTRA_STATE: dict[tuple[str, str], object] = {
    **_COMMON,
    **_TE,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _load_legacy,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _load_legacy,
}
_TORCH_FILE: dict[tuple[str, str], object] = {
    **_COMMON,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch._utils", "_rebuild_tensor_v2"): _as_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _as_typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
}


class _Door(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], object], origin: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._origin = allowed, origin

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise _refused(f"{module}.{name}", self._origin)
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype)):
            raise ValueError("unknown persistent id")
        return StorageRef(str(pid[2]), pid[1], int(pid[4]))


def _check_opcodes(data: bytes) -> None:
    """Refuse a memo slot beyond the stream's own length: the unpickler would allocate up to it."""
    for opcode, argument, _ in pickletools.genops(data):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > len(data):
            raise ValueError("memo index out of range")


def _load(data: bytes, allowed: Mapping[tuple[str, str], object], origin: str) -> object:
    if len(data) > _LIMIT:
        raise CheckpointError(f"a pickle of {len(data)} bytes", where=origin, hint="expected at most a few megabytes")
    try:
        _check_opcodes(data)
        return _Door(data, allowed, origin).load()
    except CheckpointError as error:
        if not error.where:
            raise type(error)(error.what, where=origin, hint=error.hint) from error
        raise
    except Exception as error:  # the opcodes of a damaged stream can raise anything
        raise CheckpointError(
            f"the pickle is damaged or cut short: {error}", where=origin, hint="fetch the checkpoint again"
        ) from error


def load_extra_state(data: bytes, origin: str) -> object:
    """Unpickle a Transformer Engine extra state. Tensors come back on the CPU, recipes as `Inert`.

    Raises UnsafePickleError, naming the global, for any name outside the allow-list.
    """
    return _torch_load(data, origin) if data[:4] == b"PK\x03\x04" else _load(data, _EXTRA_STATE, origin)


def load_torch_file(data: bytes, origin: str) -> object:
    """Unpickle `data.pkl` of a torch.save archive. Tensors come back as `StoredTensor`, without their bytes."""
    return _load(data, _TORCH_FILE, origin)
