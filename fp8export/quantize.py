"""One fused set in, E4M3 codes and scales out, in row chunks: memory does not grow with the matrix."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CheckpointError, ScaleError
from .kernels import SATURATES_ABOVE, amax, amax_rows, count_clipped, multiplier_for, quantize, reciprocal
from .layout import Record, Sink
from .model import HIGH_PRECISION_DTYPES, Grain, How, LazyTensor, QuantizedLinear


@dataclass(slots=True)
class _Cast:
    """What one pass over a weight saw."""

    amax: float
    clipped: int
    clipped_at_learned: int


def quantize_set(linears: tuple[QuantizedLinear, ...], grain: Grain, strict: bool, sink: Sink) -> list[Record]:
    """Stream the codes, scales and biases of one fused set into `sink`; return one record per linear.

    A learned weight scale is kept unless a code would clip; then that scale is recomputed from the weight and the
    record says so. Raises ScaleError instead when `strict`, CheckpointError for a NaN or infinity.
    """
    records = []
    if grain is Grain.CHANNEL and all(linear.weight_scale is None and linear.input_scale is None for linear in linears):
        records = [_by_row(linear, sink) for linear in linears]
    else:
        records = _by_tensor(linears, grain, strict, sink)
    for linear in linears:
        if linear.input_scale is not None:
            sink(f"{linear.name}.input_scale", 0, torch.tensor([linear.input_scale.value]))
        if linear.bias is not None:
            copy_rows(f"{linear.name}.bias", linear.bias, sink)
    return records


def copy_rows(name: str, tensor: LazyTensor, sink: Sink) -> None:
    """Pass a tensor through unchanged. NaN is refused; infinity may be a mask."""
    for lo, hi in tensor.chunks():
        rows = tensor.read(lo, hi)
        if tensor.dtype in HIGH_PRECISION_DTYPES and math.isnan(amax(rows)):
            raise _not_finite("the tensor holds NaN", tensor.origin)
        sink(name, lo, rows)


def _by_tensor(linears: tuple[QuantizedLinear, ...], grain: Grain, strict: bool, sink: Sink) -> list[Record]:
    multipliers = {
        linear.name: linear.weight_scale.multiplier if linear.weight_scale else _from_weight(_scan(linear.weight))
        for linear in linears
    }
    # the set becomes one matrix: with one scale for it, the largest scale is the one that clips nobody
    unify = grain is Grain.TENSOR
    used = dict.fromkeys(multipliers, min(multipliers.values())) if unify else dict(multipliers)
    # hopeful first pass: the learned scale nearly always fits, so the weight is read once
    casts = {linear.name: _cast(linear, used[linear.name], sink) for linear in linears}
    outgrown = [linear for linear in linears if casts[linear.name].clipped]
    if outgrown and strict:
        raise ScaleError(
            f"{casts[outgrown[0].name].clipped} codes would clip at the learned weight scale",
            where=outgrown[0].weight.origin,
            hint="leave --strict out to recompute this scale from the weight",
        )
    for linear in outgrown:
        used[linear.name] = _from_weight(casts[linear.name].amax)
    if unify and outgrown:
        used = dict.fromkeys(used, min(used.values()))
    for linear in linears if unify and outgrown else outgrown:
        _cast(linear, used[linear.name], sink)
    records = []
    for linear in linears:
        scale = float(reciprocal(used[linear.name]))
        shape = (linear.weight.shape[0], 1) if grain is Grain.CHANNEL else (1,)
        sink(f"{linear.name}.weight_scale", 0, torch.full(shape, scale))
        if linear in outgrown:
            how = "recomputed: the weight outgrew its learned scale"
        elif linear.weight_scale is None:
            how = str(How.COMPUTED)
        elif used[linear.name] != multipliers[linear.name]:
            how = "unified with its fused set"
        else:
            how = str(linear.weight_scale.how)
        seen = casts[linear.name]
        records.append(_record(linear, how, scale, seen.clipped_at_learned / max(1, linear.weight.numel), seen.amax))
    return records


def _by_row(linear: QuantizedLinear, sink: Sink) -> Record:
    low, high, largest = math.inf, 0.0, 0.0
    for lo, hi in linear.weight.chunks():
        rows = linear.weight.read(lo, hi)
        peaks = amax_rows(rows)
        _refuse_non_finite(float(amax(peaks)), linear.weight.origin)
        multipliers = multiplier_for(peaks)
        scales = reciprocal(multipliers)
        sink(f"{linear.name}.weight", lo, quantize(rows, multipliers))
        sink(f"{linear.name}.weight_scale", lo, scales)
        low, high, largest = (
            min(low, float(scales.min())),
            max(high, float(scales.max())),
            max(largest, float(peaks.max())),
        )
    return _record(linear, f"{How.COMPUTED} for each row", [low, high], 0.0, largest)


def _cast(linear: QuantizedLinear, multiplier: float, sink: Sink) -> _Cast:
    seen = _Cast(0.0, 0, 0)
    learned = linear.weight_scale.multiplier if linear.weight_scale else multiplier
    for lo, hi in linear.weight.chunks():
        rows = linear.weight.read(lo, hi)
        peak = amax(rows)
        _refuse_non_finite(peak, linear.weight.origin)
        seen.amax = max(seen.amax, peak)
        if peak * multiplier > SATURATES_ABOVE:
            seen.clipped += count_clipped(rows, multiplier)
        if peak * learned > SATURATES_ABOVE:
            seen.clipped_at_learned += count_clipped(rows, learned)
        sink(f"{linear.name}.weight", lo, quantize(rows, multiplier))
    return seen


def stored_amax(weight: LazyTensor) -> float:
    """Return the largest magnitude of a tensor on disk, or NaN or infinity when it holds one."""
    return amax(torch.tensor([amax(weight.read(lo, hi)) for lo, hi in weight.chunks()]))


def _scan(weight: LazyTensor) -> float:
    largest = stored_amax(weight)
    _refuse_non_finite(largest, weight.origin)
    return largest


def _from_weight(largest: float) -> float:
    return float(multiplier_for(largest))


def _refuse_non_finite(peak: float, origin: str) -> None:
    if not math.isfinite(peak):
        raise _not_finite("the weight holds NaN or infinity", origin)


def _not_finite(what: str, origin: str) -> CheckpointError:
    return CheckpointError(what, where=origin, hint="the run diverged: export an earlier checkpoint")


def _record(linear: QuantizedLinear, how: str, scale: Any, clipped: float, largest: float) -> Record:
    learned, given = linear.weight_scale, linear.input_scale
    return {
        "linear": linear.name,
        "shape": list(linear.weight.shape),
        "weight": {
            "source": linear.weight.origin,
            "amax": largest,
            "scale": scale,
            "how": how,
            "scale_source": learned.origin if learned else None,
            "learned_scale": learned.value if learned else None,
            "clipped_at_learned_scale": clipped,
        },
        "input": {"scale": given.value, "how": str(given.how), "scale_source": given.origin}
        if given
        else {"how": "dynamic, per token"},
    }
