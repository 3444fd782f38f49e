"""The weights depth: codes and scales are exactly what training used, or the export had a stated reason."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import arch
from ..kernels import (
    SATURATES_ABOVE,
    amax,
    amax_rows,
    count_clipped,
    dequantize,
    multiplier_for,
    quantize,
    reciprocal,
)
from ..model import Checkpoint, Grain, ScaleSet, TrainedLinear
from ..quantize import stored_amax
from ..report import LinearParity
from ..store import Store
from ..targets import StoredFormat
from .stored import StoredLinear

_CHUNK_BYTES = 512 << 10  # of source weight: all passes over one piece stay in the cache


@dataclass(frozen=True, slots=True)
class _Expected:
    multiplier: float | None  # None: one for each row
    exactness: str
    why: str


def judge_config(checkpoint: Checkpoint, store: Store) -> list[str]:
    """The export's config must describe the trained model: servers build the model from it alone."""
    found, trained = dict(store.config), dict(checkpoint.config)
    found.pop("quantization_config", None)
    keys = [key for key in (*trained, *found) if found.get(key) != trained.get(key)]
    return [
        f"config.json: {key} is {found.get(key)!r}, trained with {trained.get(key)!r}" for key in dict.fromkeys(keys)
    ]


def judge_plain(checkpoint: Checkpoint, store: Store, quantized: set[str]) -> list[str]:
    """High-precision tensors pass through to the byte, and nothing else is there; returns what is not so."""
    expected = dict(checkpoint.plain)
    for linear in checkpoint.linears:
        if linear.name not in quantized:
            expected[f"{linear.name}.weight"] = linear.weight
        if linear.bias is not None:
            expected[f"{linear.name}.bias"] = linear.bias
    faults = []
    for key, tensor in expected.items():
        found = store.tensors.get(key)
        if found is None:
            faults.append(f"{key}: missing from the export")
        elif found.shape != tensor.shape or found.dtype != tensor.dtype:
            faults.append(f"{key}: {found.dtype} {list(found.shape)} instead of {tensor.dtype} {list(tensor.shape)}")
        elif not all(_same_bytes(found.read(lo, hi), tensor.read(lo, hi)) for lo, hi in tensor.chunks()):
            faults.append(f"{key}: high-precision values differ from the checkpoint")
    parts = {
        f"{linear.name}.{part}" for linear in checkpoint.linears for part in ("weight", "weight_scale", "input_scale")
    }
    faults += [
        f"{key}: not part of the checkpoint" for key in store.tensors if key not in expected and key not in parts
    ]
    return faults


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def judge_weight(
    source: TrainedLinear, export: StoredLinear, scales: ScaleSet, checkpoint: Checkpoint, stored: StoredFormat
) -> LinearParity:
    linear = LinearParity(source.name)
    expected = _explain(source, export.weight_scale, scales, checkpoint, stored)
    linear.exactness, linear.why = expected.exactness, expected.why
    _compare_codes(linear, source, export, expected)
    if linear.differing_codes:
        linear.exactness = "differs"
        linear.why = f"{linear.differing_codes} codes are not the cast of the weight at the stored scale"
    members = [scales.inputs[m] for m in arch.fused_members(source.name) if m in scales.inputs]
    wanted = max((scale.value for scale in members), default=None)
    found = None if export.input_scale is None else float(export.input_scale)
    if found != wanted:
        linear.input_scale = "differs"
        text = f"input_scale is {found or 'dynamic'}, learned was {wanted or 'none'}"
        linear.why = f"{linear.why}; {text}" if linear.exactness == "differs" else text
    elif found is None:
        linear.input_scale = "dynamic"
    else:
        linear.input_scale = "exact" if found == scales.inputs[source.name].value else "unified"
    return linear


def _explain(
    source: TrainedLinear, stored: Tensor, scales: ScaleSet, checkpoint: Checkpoint, layout: StoredFormat
) -> _Expected:
    """Find the multiplier behind a stored weight scale, and whether the export had a reason to use it."""
    learned = scales.weights.get(source.name)
    value = float(stored.reshape(-1)[0])
    if learned is None and not layout.static_inputs:
        return _Expected(None, "requantised", "computed from the weight, row by row")
    if not bool((stored == value).all()):
        return _Expected(None, "differs", "weight_scale varies by row, learned was one")
    if learned is not None and value == learned.value:
        return _Expected(learned.multiplier, "exact", "")
    largest = stored_amax(source.weight)
    computed = float(multiplier_for(largest))
    outgrown = learned is not None and largest * learned.multiplier > SATURATES_ABOVE
    candidates = [(computed, "the weight outgrew its learned scale" if outgrown else "computed from the weight")]
    if layout.weights is Grain.TENSOR:
        candidates += [(m, "unified with its fused set") for m in _set_multipliers(source, scales, checkpoint)]
    for multiplier, why in candidates:
        if float(reciprocal(multiplier)) == value and (learned is None or outgrown or why.startswith("unified")):
            return _Expected(multiplier, "requantised", why)
    text = f"weight_scale is {value:.9g}" + (f", learned was {learned.value:.9g}" if learned else "")
    return _Expected(float(reciprocal(value)), "differs", text)


def _set_multipliers(source: TrainedLinear, scales: ScaleSet, checkpoint: Checkpoint) -> list[float]:
    members = [linear for linear in checkpoint.linears if linear.fused_set == source.fused_set]
    found = [scales.weights[m.name].multiplier for m in members if m.name in scales.weights]
    return found + [float(multiplier_for(stored_amax(member.weight))) for member in members]


def _compare_codes(linear: LinearParity, source: TrainedLinear, export: StoredLinear, expected: _Expected) -> None:
    """One pass over both weights in pieces that stay in the cache."""
    signal = noise = cross = 0.0
    clipped = flushed = 0
    for lo, hi in source.weight.chunks(_CHUNK_BYTES):
        weight, codes = source.weight.read(lo, hi), export.codes.read(lo, hi)
        peak = amax(weight)
        scale = export.weight_scale if export.weight_scale.ndim == 1 else export.weight_scale[lo:hi]
        if expected.multiplier is None:
            multiplier: float | Tensor = multiplier_for(amax_rows(weight))
            linear.differing_codes += int(torch.count_nonzero(reciprocal(multiplier) != scale))
        else:
            multiplier = expected.multiplier
            clipped += count_clipped(weight, multiplier) if peak * multiplier > SATURATES_ABOVE else 0
        wanted = quantize(weight, multiplier).view(torch.uint8)
        if not torch.equal(wanted, codes.view(torch.uint8)):
            linear.differing_codes += int(torch.count_nonzero(wanted != codes.view(torch.uint8)))
        real, high = dequantize(codes, scale).reshape(-1), weight.float().reshape(-1)
        # on one-byte codes and the stored type: a fraction of the traffic of float32
        flushed += int(torch.count_nonzero(weight)) - int(torch.count_nonzero(codes.view(torch.uint8) & 0x7F))
        signal += float(torch.dot(high, high))
        cross += float(torch.dot(high, real))
        error = real.sub_(high)
        noise += float(torch.dot(error, error))
    count = max(1, source.weight.numel)
    linear.clipped, linear.flushed = clipped / count, max(0, flushed) / count
    linear.relative_error = math.sqrt(noise / signal) if signal else 0.0
    linear.sqnr_db = 10 * math.log10(signal / noise) if noise and signal else math.inf
    real_norm = signal + 2 * (cross - signal) + noise
    linear.cosine_distance = max(0.0, 1 - cross / math.sqrt(signal * real_norm)) if signal and real_norm > 0 else 0.0
