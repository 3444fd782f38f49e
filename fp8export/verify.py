"""Re-read a finished folder and judge it as a gate, before a server misreads it in silence.

Trusts nothing but the bytes on disk. Knows no target by name: what the config promises comes from `targets`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import arch
from .errors import CheckpointError
from .kernels import amax, has_nan_code
from .model import DTYPES, HIGH_PRECISION_DTYPES, Grain, LazyTensor
from .report import to_json
from .store.disk import is_plain_name, read_json, tensor_at
from .store.safetensors_dir import TensorInfo, read_header
from .targets import StoredFormat, read_format

_FP8 = "F8_E4M3"
_SCALES = ("weight_scale", "input_scale")
# what other formats and trainers put beside a weight
_FOREIGN = (
    *("_extra_state", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_shape", "weight_zero_point"),
    *("input_zero_point", "input_global_scale", "weight_global_scale", "output_scale", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Fault:
    rule: str
    what: str
    where: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    folder: str
    faults: tuple[Fault, ...]
    fp8_linears: int
    files: int
    nbytes: int
    bits_per_weight: float
    codes_read: bool

    @property
    def passed(self) -> bool:
        return not self.faults

    def to_json(self) -> str:
        return to_json({"passed": self.passed, **asdict(self)})


@dataclass(frozen=True, slots=True)
class _Tensor:
    info: TensorInfo
    file: Path
    data: LazyTensor


def verify_folder(
    folder: Path, *, codes: bool = True, on_progress: Callable[[int, int, str], None] | None = None
) -> VerifyReport:
    """Check every rule and return all faults. `codes=False` reads headers and scales only."""
    faults: list[Fault] = []
    config: Mapping[str, Any] = {}
    stored = None
    try:
        config = read_json(folder / "config.json")
        stored, texts = read_format(config)
        faults += [Fault("config", text, str(folder / "config.json")) for text in texts]
    except (CheckpointError, OSError) as error:
        faults.append(_from_error("config", error, folder / "config.json"))
    tensors = _tensors(folder, faults)
    faults += _pairs(tensors, stored)
    faults += _completeness(tensors, config)
    if stored is not None:
        faults += _exclusions(tensors, stored, config)
        faults += _fused(tensors, stored)
    faults += _scale_values(tensors)
    if codes:
        faults += _codes(tensors, on_progress or (lambda *_: None))
    linears = [t for key, t in tensors.items() if t.info.dtype == _FP8]
    elements = sum(t.data.numel for key, t in tensors.items() if key.endswith(".weight"))
    nbytes = sum(t.info.nbytes for t in tensors.values())
    return VerifyReport(
        folder=str(folder),
        faults=tuple(faults),
        fp8_linears=len(linears),
        files=len({t.file for t in tensors.values()}),
        nbytes=nbytes,
        bits_per_weight=round(8 * nbytes / elements, 2) if elements else 0.0,
        codes_read=codes,
    )


def _tensors(folder: Path, faults: list[Fault]) -> dict[str, _Tensor]:
    """All tensors of all shards; the index is checked against what the shards hold, never believed."""
    index, single = folder / _INDEX, folder / "model.safetensors"
    weight_map: dict[str, Any] = {}
    if index.is_file():
        try:
            found = read_json(index).get("weight_map")
            weight_map = found if isinstance(found, dict) else {}
            if not weight_map:
                faults.append(Fault("index", "the index has no weight_map", str(index)))
        except CheckpointError as error:
            faults.append(_from_error("index", error, index))
        if single.is_file():
            faults.append(
                Fault("index", "model.safetensors lies beside an index: loaders differ in which they take", str(single))
            )
    names = (
        sorted({name for name in weight_map.values() if isinstance(name, str)}) if index.is_file() else [single.name]
    )
    tensors: dict[str, _Tensor] = {}
    for name in names:
        if not is_plain_name(name):
            faults.append(Fault("path", "the index points outside its folder", f"{index}: {name!r}"))
            continue
        path = folder / name
        if not path.is_file():
            faults.append(Fault("index", "this shard is not there", str(path)))
            continue
        try:
            infos = read_header(path)
        except (CheckpointError, OSError) as error:
            faults.append(_from_error("shard", error, path))
            continue
        for key, info in infos.items():
            where = f"{path}::{key}"
            if key in tensors:
                faults.append(Fault("index", f"two owners: {tensors[key].file.name} holds it too", where))
            elif index.is_file() and key not in weight_map:
                faults.append(Fault("index", "the tensor is not in the index: loaders would skip it", where))
            tensors[key] = _Tensor(info, path, tensor_at(path, info.offset, info.shape, DTYPES[info.dtype], where))
    for key, shard in weight_map.items():
        if key not in tensors or tensors[key].file.name != shard:
            faults.append(
                Fault("index", "the index names a tensor that its shard does not hold", f"{index}: {key} -> {shard}")
            )
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in names:
            faults.append(Fault("stray", "a weight file that the index does not name: vLLM may load it", str(path)))
    return tensors


def _pairs(tensors: Mapping[str, _Tensor], stored: StoredFormat | None) -> Iterator[Fault]:
    """Loaders fill a missing scale with garbage and serve."""
    for key, tensor in tensors.items():
        where = f"{tensor.file}::{key}"
        module, _, last = key.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        quantized = weight is not None and weight.info.dtype == _FP8
        if last in _SCALES and not quantized:
            yield Fault("pair", "a scale without an FP8 weight", where)
        elif (quantized and last not in ("weight", "bias", *_SCALES)) or last in _FOREIGN:
            yield Fault("pair", "loaders have no place for this tensor: vLLM stops at it", where)
        if quantized and weight is not None and last == "bias" and tensor.info.shape != weight.info.shape[:1]:
            yield Fault("pair", f"a bias of {list(tensor.info.shape)} beside {list(weight.info.shape)}", where)
        if tensor.info.dtype.startswith("F8_") and not (last == "weight" and tensor.info.dtype == _FP8):
            yield Fault("pair", f"type {tensor.info.dtype} on something that is not a linear's weight", where)
        if stored is None or tensor.info.dtype != _FP8 or last != "weight":
            continue
        if len(tensor.info.shape) != 2:
            yield Fault("pair", f"an FP8 weight of shape {tensor.info.shape}", where)
            continue
        wanted = {"weight_scale": stored.scale_shape(tensor.info.shape)}
        if stored.static_inputs:
            wanted["input_scale"] = (1,)
        elif f"{module}.input_scale" in tensors:
            yield Fault(
                "config", "a static input scale, but the config says dynamic", f"{tensor.file}::{module}.input_scale"
            )
        for name, shape in wanted.items():
            scale = tensors.get(f"{module}.{name}")
            if scale is None:
                yield Fault("pair", f"an FP8 weight without {name}", where)
            elif scale.info.dtype != "F32" or scale.info.shape != shape:
                yield Fault(
                    "scale",
                    f"{scale.info.dtype} {list(scale.info.shape)}, the config wants F32 {list(shape)}",
                    f"{scale.file}::{module}.{name}",
                )


def _completeness(tensors: Mapping[str, _Tensor], config: Mapping[str, Any]) -> Iterator[Fault]:
    """As far as headers tell: no loader of a quantised model counts what it did not get."""
    layers: dict[int, set[str]] = {}
    for key in tensors:
        if found := re.search(r"\.layers\.(\d+)\.", key):
            layers.setdefault(int(found[1]), set()).add(key[found.end() :])
    promised = config.get("num_hidden_layers")
    if layers and isinstance(promised, int) and not set(range(promised)) <= set(layers):
        yield Fault("complete", f"config.json promises {promised} layers, the shards hold {len(layers)}", "config.json")
    modules = {key.rpartition(".")[0] for key in tensors}
    if tensors and not any(arch.is_embedding(module) for module in modules):
        yield Fault("complete", "there is no embedding", ", ".join(sorted({t.file.name for t in tensors.values()})))
    for layer, names in sorted(layers.items()):
        for name in sorted(name for name in names if name.endswith(".weight")):
            lacking = [m for m in arch.fused_members(name.removesuffix(".weight")) if f"{m}.weight" not in names]
            if lacking:
                yield Fault("complete", f"{', '.join(lacking)} of the fused set is not there", f"layer {layer}")


def _exclusions(tensors: Mapping[str, _Tensor], stored: StoredFormat, config: Mapping[str, Any]) -> Iterator[Fault]:
    modules = {key.rpartition(".")[0]: t for key, t in tensors.items() if key.endswith(".weight")}
    names = set(modules)
    if config.get("tie_word_embeddings", True):
        names.add("lm_head")  # exists in the model, shares its bytes with the embedding
    for dead in stored.dead_patterns(names):
        yield Fault(
            "exclude", f"the pattern {dead!r} matches nothing: the layer it meant is not protected", "config.json"
        )
    for module, tensor in modules.items():
        pattern = stored.ignored_by(module)
        where = f"{tensor.file}::{module}.weight"
        if tensor.info.dtype == _FP8 and pattern:
            yield Fault(
                "exclude", f"an FP8 weight is excluded by {pattern!r}: loaders have no place for its scales", where
            )
        if arch.is_matrix(f"{module}.weight", tensor.data) and not arch.is_embedding(module) and not pattern:
            yield Fault("exclude", "a high-precision matrix is not excluded: loaders would take it for FP8", where)
    if not any(tensor.info.dtype == _FP8 for tensor in tensors.values()):
        yield Fault("config", "the config promises FP8 and no weight is", "config.json")


def _fused(tensors: Mapping[str, _Tensor], stored: StoredFormat) -> Iterator[Fault]:
    """Members of a fused set must agree, or the engine requantises them on load."""
    sets: dict[str, list[str]] = {}
    for key in tensors:
        if key.endswith(".weight"):
            module = key.removesuffix(".weight")
            sets.setdefault(arch.fused_set(module), []).append(module)
    for members in sets.values():
        fp8 = [m for m in members if tensors[f"{m}.weight"].info.dtype == _FP8]
        if len(members) < 2 or not fp8:
            continue
        if len(fp8) != len(members):
            yield Fault("fused", "only some members of a fused set are FP8: engines refuse it", ", ".join(members))
            continue
        shared = ["input_scale"] if stored.static_inputs else []
        shared += ["weight_scale"] if stored.weights is Grain.TENSOR else []
        for name in shared:
            values = {_scalar(tensors.get(f"{m}.{name}")) for m in fp8}
            if len(values - {None}) > 1:
                yield Fault(
                    "fused", f"members of a fused set have different {name}: engines requantise", ", ".join(fp8)
                )


def _scale_values(tensors: Mapping[str, _Tensor]) -> Iterator[Fault]:
    for key, tensor in tensors.items():
        if key.rpartition(".")[2] in _SCALES and tensor.info.dtype == "F32":
            values = tensor.data.read()
            if values.numel() and not bool((values.isfinite() & (values > 0)).all()):
                yield Fault("scale", "not finite and positive", f"{tensor.file}::{key}")


def _codes(tensors: Mapping[str, _Tensor], on_progress: Callable[[int, int, str], None]) -> Iterator[Fault]:
    total, done = sum(t.info.nbytes for t in tensors.values()), 0
    for key, tensor in tensors.items():
        on_progress(done, total, key)
        if tensor.data.dtype in HIGH_PRECISION_DTYPES:
            if any(math.isnan(amax(tensor.data.read(lo, hi))) for lo, hi in tensor.data.chunks()):
                yield Fault("codes", "NaN in a high-precision tensor", f"{tensor.file}::{key}")
        elif tensor.info.dtype == _FP8 and any(
            has_nan_code(tensor.data.read(lo, hi)) for lo, hi in tensor.data.chunks()
        ):
            yield Fault(
                "codes", "a NaN code (0x7F or 0xFF) in the weight: no loader checks for it", f"{tensor.file}::{key}"
            )
        done += tensor.info.nbytes


def _scalar(tensor: _Tensor | None) -> float | None:
    if tensor is None or tensor.data.numel != 1:
        return None
    value = float(tensor.data.read())
    return value if math.isfinite(value) else None


def _from_error(rule: str, error: Exception, path: Path) -> Fault:
    if isinstance(error, CheckpointError):
        return Fault(rule, error.what, error.where or str(path))
    return Fault(rule, str(error), str(path))
