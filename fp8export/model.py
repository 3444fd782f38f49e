"""Nouns of input and of the plan: what a checkpoint holds and what was decided about it.

A `scale` is always the dequantisation multiplier (real = code * scale) and a history is always newest first; sources
turn both once, when they read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# safetensors' names for the element types, in the order in which its writer lays tensors into a file
_DTYPE_NAMES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPES: dict[str, torch.dtype] = {k: getattr(torch, v) for k, v in _DTYPE_NAMES.items() if hasattr(torch, v)}
DTYPE_NAMES: dict[torch.dtype, str] = {v: k for k, v in DTYPES.items()}
HIGH_PRECISION_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that stays on disk. `origin` is "file::key", for every message and report."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    fetch: Callable[[int, int], Tensor]  # rows [lo, hi) along dimension 0; a scalar is row 0

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        return self.fetch(lo, self.rows if hi is None else hi)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunks(self, target_bytes: int = 8 << 20) -> list[tuple[int, int]]:
        """Row ranges that cover the tensor, each about `target_bytes` of storage."""
        step = max(1, target_bytes * self.rows // max(1, self.nbytes))
        return [(lo, min(lo + step, self.rows)) for lo in range(0, self.rows, step)]


class Note(NamedTuple):
    """Something the user should know; equal texts are shown once with a count."""

    text: str
    where: str = ""


class Grain(StrEnum):
    TENSOR = "tensor"
    CHANNEL = "channel"


class How(StrEnum):
    LEARNED = "learned"
    HISTORY_MAX = "history-max"
    MOST_RECENT = "most-recent"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class ScaleEvidence:
    """What training left behind for one tensor slot. No decision is taken here."""

    scale: float
    multiplier: float  # the trainer's own factor before the cast, float32; codes need it to the bit
    amax_history: Tensor  # [H'], newest first
    pending: float  # an amax newer than the history, 0 when none
    folds_pending: bool  # the trainer would take `pending` into the scale before the next cast
    floors_scale: bool  # it rounds the scale down to a power of two when it does
    algorithm: str  # "max", "most_recent", or the name of a user's function
    margin: int
    fp8_max: float  # largest finite value of the forward format
    configured_history: int | None
    origin: str


@dataclass(frozen=True, slots=True)
class TrainedLinear:
    name: str
    weight: LazyTensor  # [N, K]
    bias: LazyTensor | None
    fused_set: str
    weight_evidence: ScaleEvidence | None
    input_evidence: ScaleEvidence | None
    nothing_learned: str = ""  # why there is no evidence, in words


@dataclass(frozen=True, slots=True)
class Checkpoint:
    source: str
    recipe: str  # one line on how it was trained, as far as the files tell
    linears: tuple[TrainedLinear, ...]
    plain: Mapping[str, LazyTensor]
    plain_reasons: Mapping[str, str]  # why a weight matrix stays in high precision
    ignored: Mapping[str, str]
    config: Mapping[str, Any]
    assets: Mapping[str, Path]
    skipped_files: Mapping[str, str]
    identity: str  # of the content, the same wherever the files lie
    modified: tuple[int, ...]  # of the weight files, ns: an edit that `identity` did not sample
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """One per-tensor scale and where it came from."""

    value: float
    multiplier: float
    how: How
    origin: str


@dataclass(frozen=True, slots=True)
class ScaleSet:
    """Static scales by linear name. `missing` says why a linear has none that can be used."""

    inputs: Mapping[str, Scale] = field(default_factory=dict)
    weights: Mapping[str, Scale] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Scheme:
    scales: str = "learned"  # a policy, "dynamic", or "file"
    weights: str = "auto"  # "auto", "tensor" or "channel"
    keep: tuple[str, ...] = ()
    strict: bool = False

    @property
    def dynamic_inputs(self) -> bool:
        return self.scales == "dynamic"


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    name: str
    weight: LazyTensor
    bias: LazyTensor | None
    fused_set: str
    weight_scale: Scale | None  # None: taken from the weight while it streams by
    input_scale: Scale | None  # None: computed by the engine for every token


@dataclass(frozen=True, slots=True)
class ModelPlan:
    source: str
    recipe: str
    grain: Grain
    linears: tuple[QuantizedLinear, ...]
    plain: Mapping[str, LazyTensor]
    kept: Mapping[str, str]  # linear-like module -> why it stays in high precision
    ignored: Mapping[str, str]
    config: Mapping[str, Any]
    assets: Mapping[str, Path]
    skipped_files: Mapping[str, str]
    identity: str
    modified: tuple[int, ...]
    scheme: Scheme
    notes: tuple[Note, ...] = ()

    @property
    def fused_sets(self) -> dict[str, tuple[QuantizedLinear, ...]]:
        """Linears that become one matrix in every engine, in order of first appearance."""
        sets: dict[str, tuple[QuantizedLinear, ...]] = {}
        for linear in self.linears:
            sets[linear.fused_set] = (*sets.get(linear.fused_set, ()), linear)
        return sets
