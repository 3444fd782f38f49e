"""The user's own data as token ids."""

import json
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, RequestError
from ..model import DTYPES
from ..store.disk import tensor_at
from ..store.safetensors_dir import read_header

_BYTE_VOCABULARY = 256
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def read_tokens(path: Path, folder: Path, vocabulary: int, samples: int, length: int) -> Tensor:
    """Return int64 [samples, length], taken evenly from the file.

    Token ids come from .npy or .safetensors (`input_ids`, or the only integer tensor); text from .jsonl (`text`) or any
    other file, through the tokenizer in `folder`, or byte by byte for a vocabulary of 256. Raises RequestError when the
    file holds too little, CheckpointError when it is damaged.
    """
    if not path.is_file():
        raise RequestError(
            "no such data file", where=str(path), hint="give --data a text, .jsonl, .npy or .safetensors file"
        )
    if path.suffix in (".npy", ".safetensors"):
        ids = _ids_from_npy(path) if path.suffix == ".npy" else _ids_from_safetensors(path)
        if ids.ndim == 2 and ids.shape[1] >= 2:
            rows = ids[:samples, :length]
            return _checked(rows, vocabulary, path)
        stream = ids.reshape(-1)
    else:
        text = _jsonl(path) if path.suffix == ".jsonl" else path.read_bytes()
        stream = _encode(text, folder, vocabulary)
    if len(stream) < length:
        raise RequestError(
            f"{len(stream)} tokens are fewer than one sequence of {length}",
            where=str(path),
            hint="give more text or --seq-len",
        )
    count = min(samples, len(stream) // length)
    step = (len(stream) - length) // max(1, count - 1) if count > 1 else 0
    return _checked(torch.stack([stream[i * step : i * step + length] for i in range(count)]), vocabulary, path)


def _ids_from_npy(path: Path) -> Tensor:
    import numpy

    try:
        array = numpy.load(path, allow_pickle=False)
        if array.dtype.kind not in "iu":
            raise ValueError(f"its type is {array.dtype}")
        return torch.from_numpy(array.astype("int64"))
    except (ValueError, OSError, EOFError) as error:
        raise CheckpointError(
            "not an array of integer token ids", where=str(path), hint="save int32 or int64 ids with numpy.save"
        ) from error


def _ids_from_safetensors(path: Path) -> Tensor:
    infos = {key: info for key, info in read_header(path).items() if info.dtype.startswith(("I", "U"))}
    key = "input_ids" if "input_ids" in infos else next(iter(infos), None)
    if key is None or (len(infos) > 1 and key != "input_ids"):
        raise RequestError("no tensor called input_ids", where=str(path), hint="name the token ids input_ids")
    info = infos[key]
    return tensor_at(path, info.offset, info.shape, DTYPES[info.dtype], f"{path}::{key}").read().long()


def _jsonl(path: Path) -> bytes:
    texts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError
            texts.append(text)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                "a line is not an object with `text`", where=f"{path}:{number}", hint='write {"text": "…"} on each line'
            ) from error
    return "\n".join(texts).encode()


def _encode(text: bytes, folder: Path, vocabulary: int) -> Tensor:
    if any((folder / name).is_file() for name in _TOKENIZERS):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RequestError("transformers is not installed", hint="pip install 'fp8export[hf]'") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # foreign code reading a foreign file
            raise CheckpointError(
                f"the tokenizer cannot be read: {error}", where=str(folder), hint="give token ids"
            ) from error
        return torch.tensor(tokenizer(text.decode("utf-8", errors="replace"))["input_ids"])
    if vocabulary != _BYTE_VOCABULARY:
        raise RequestError(
            f"text needs a tokenizer and {folder} has none",
            hint="put the tokenizer beside config.json, or give token ids as .npy or .safetensors",
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.empty(0, dtype=torch.int64)


def _checked(ids: Tensor, vocabulary: int, path: Path) -> Tensor:
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise RequestError(
            f"token ids are outside the vocabulary of {vocabulary}",
            where=str(path),
            hint="were they made for this model?",
        )
    return ids
