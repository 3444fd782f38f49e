"""The only door through which a pickle enters. It knows exact names; anything else is refused before it is built.

Nothing that a pickle names is ever imported: each allowed name maps to a value given here, and classes of frameworks
map to inert stand-ins that only remember what they were given.
"""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

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
class StorageRef:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor described by a torch file's pickle: where it lies in which storage, not its bytes."""

    storage: StorageRef
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Allowed:
    """A function that a pickle may call. Wrapped, because a pickle may also set attributes on what it names."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        return self._function(*args)


def _inert(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"__module__": module})


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Protocol 2 writes bytes as an encoded string; other codecs would import modules."""
    if encoding != "latin1":
        raise _refused(f"the codec {encoding!r}", "")
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
        hint="if you know who wrote it and where: load it there and save model.state_dict() alone; otherwise delete it",
    )


def _small_tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    """torch's own function would grow a storage that is too small, with whatever lies in memory."""
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    held = storage._untyped_storage.nbytes() // storage.dtype.itemsize
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *stride)) or offset + span > held:
        raise ValueError("a tensor reaches past its storage")
    return torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage, offset, shape, stride)


def _stored(
    storage: StorageRef, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), storage.dtype)


def _stored_typed(
    storage: StorageRef,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: object,
    _hooks: object,
    dtype: torch.dtype,
    *_: object,
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype) or not isinstance(storage, StorageRef):
        raise ValueError("a tensor without type or storage")
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), dtype)


def _first(value: object, *_: object) -> object:
    return value


def _ordered(pairs: Any = ()) -> OrderedDict[str, object]:
    for key, _ in pairs:
        _check_key(key)
    return OrderedDict(pairs)


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
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_COMMON: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Allowed(_ordered),
    ("torch", "Size"): tuple,
    ("_codecs", "encode"): _Allowed(_latin1),
}
# transformer_engine/common/recipe/__init__.py, 2.0 to 2.20; Megatron core 0.8 to 0.19 pickles its own subclass
_TE_CLASSES = {
    _RECIPES: (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
        *("CustomRecipe", "Format", "_FormatHelper", "MMParams", "QParams"),
    ),
    "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
    "megatron.core.transformer.custom_layers.transformer_engine": ("TEDelayedScaling",),
}
# what training scripts save beside the model
_SCRIPT_CLASSES = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath"),
    "datetime": ("datetime", "timedelta"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "torch": ("device",),
}


def _stand_ins(classes: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], object]:
    return {(module, name): _inert(module, name) for module, names in classes.items() for name in names}


_EXTRA_STATE: dict[tuple[str, str], object] = {
    **_COMMON,
    **_stand_ins(_TE_CLASSES),
    ("torch._utils", "_rebuild_tensor_v2"): _Allowed(_small_tensor),
    ("torch.storage", "_load_from_bytes"): _Allowed(_load_legacy),
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _Allowed(_load_legacy),
}
_TORCH_FILE: dict[tuple[str, str], object] = {
    **_COMMON,
    **_stand_ins(_SCRIPT_CLASSES),
    ("_io", "BytesIO"): io.BytesIO,
    ("torch._utils", "_rebuild_tensor_v2"): _Allowed(_stored),
    ("torch._utils", "_rebuild_tensor_v3"): _Allowed(_stored_typed),
    ("torch._utils", "_rebuild_parameter"): _Allowed(_first),
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
}
_KEYS = (str, int, float, bytes, bool, type(None))
_BUILDABLE = (Inert, OrderedDict, io.BytesIO)


def _check_key(key: object) -> None:
    """Hashing a tuple of tuples of tuples can take for ever."""
    if not isinstance(key, _KEYS):
        raise ValueError("a dictionary key that is no plain value")


# pickle's machine in Python: its steps can be guarded, and its memo is a dict that a large index cannot inflate
_Machine: Any = pickle._Unpickler


class _Door(_Machine):  # type: ignore[misc]
    """pickle's machine with a lock on names, dictionary keys, and on what may be given a state."""

    stack: list[Any]

    dispatch: ClassVar[dict[int, Any]] = dict(_Machine.dispatch)

    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], object], origin: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._origin = allowed, origin

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._allowed:
            raise _refused(f"{module}.{name}", self._origin)
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype)):
            raise ValueError("unknown persistent id")
        return StorageRef(str(pid[2]), pid[1])

    def _setitem(self) -> None:
        _check_key(self.stack[-2])
        _Machine.load_setitem(self)

    def _setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        _Machine.load_setitems(self)

    def _dict(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        _Machine.load_dict(self)

    def _build(self) -> None:
        if not isinstance(self.stack[-2], _BUILDABLE):
            raise ValueError("a state for something that has none")
        _Machine.load_build(self)

    def _no_sets(self) -> None:
        raise ValueError("a set, which no checkpoint needs")

    dispatch[pickle.SETITEM[0]] = _setitem
    dispatch[pickle.SETITEMS[0]] = _setitems
    dispatch[pickle.DICT[0]] = _dict
    dispatch[pickle.BUILD[0]] = _build
    for _opcode in (pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS):
        dispatch[_opcode[0]] = _no_sets


def _load(data: bytes, allowed: Mapping[tuple[str, str], object], origin: str) -> object:
    if len(data) > _LIMIT:
        raise CheckpointError(f"a pickle of {len(data)} bytes", where=origin, hint="expected at most a few megabytes")
    try:
        result: object = _Door(data, allowed, origin).load()
        return result
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
