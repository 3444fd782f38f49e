"""safetensors files, read by header; the format is one page: https://github.com/huggingface/safetensors#format"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..model import DTYPES, LazyTensor
from .disk import parse_object, refuse_pointer, tensor_at

_HEADER_LIMIT = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor's place, after checking that they tile the file exactly.

    Raises CheckpointError for a pointer file, a cut or padded file, overlap, holes and unknown types.
    """

    def refuse(what: str, key: str = "") -> CheckpointError:
        return CheckpointError(
            what, where=f"{path}::{key}" if key else str(path), hint="the file is damaged or cut short: fetch it again"
        )

    refuse_pointer(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise refuse("not a safetensors file: its header does not fit")
        text = file.read(length)
    table = parse_object(text, f"{path}::header")
    table.pop("__metadata__", None)
    infos: dict[str, TensorInfo] = {}
    for key, item in table.items():
        try:
            dtype, shape = item["dtype"], tuple(item["shape"])
            begin, end = item["data_offsets"]
            whole = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError) as error:
            raise refuse("the header entry is malformed", key) from error
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise refuse(f"element type {dtype!r} is not known to this version", key)
        count = DTYPES[dtype].itemsize
        for n in shape if whole else ():
            count *= n
        if not whole or end - begin != count:
            raise refuse("shape and offsets do not agree", key)
        infos[key] = TensorInfo(dtype, shape, 8 + length + begin, count)
    position = 8 + length
    for key, info in sorted(infos.items(), key=lambda kv: (kv[1].offset, kv[1].nbytes)):
        if info.offset != position:
            raise refuse("tensors overlap or leave a hole", key)
        position += info.nbytes
    if position != size:
        raise refuse(f"the header describes {position} bytes, the file has {size}")
    return infos


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, object]]:
    tensors = {
        key: tensor_at(path, info.offset, info.shape, DTYPES[info.dtype], f"{path.name}::{key}")
        for key, info in read_header(path).items()
    }
    return tensors, {}
