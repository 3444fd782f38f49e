"""An export's linears, as they lie on disk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import amax, amax_rows, multiplier_for, quantize, reciprocal, scaled_mm
from ..model import Checkpoint, LazyTensor, Scale, TrainedLinear
from ..store import Store
from ..targets import StoredFormat


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One linear as the export holds it."""

    codes: LazyTensor  # [N, K]
    weight_scale: Tensor  # [1] or [N, 1]
    input_scale: Tensor | None


def _scale(store: Store, key: str, shape: tuple[int, ...]) -> tuple[Tensor | None, str]:
    """Read a scale, or say why it cannot be one."""
    found = store.tensors.get(key)
    if found is None:
        return None, f"{key} is missing"
    if found.dtype is not torch.float32 or found.shape != shape:
        return None, f"{key} is {found.dtype} {list(found.shape)}, expected float32 {list(shape)}"
    values = found.read()
    if not bool((values.isfinite() & (values > 0)).all()):
        return None, f"{key} is not finite and positive"
    return values, ""


def pair_linears(
    checkpoint: Checkpoint, store: Store, stored: StoredFormat
) -> tuple[dict[str, tuple[TrainedLinear, StoredLinear]], list[str]]:
    """Find each trained linear in the export. Returns the pairs and what could not be paired, in words."""
    pairs = {}
    faults = []
    for linear in checkpoint.linears:
        key = f"{linear.name}.weight"
        codes = store.tensors.get(key)
        if codes is None:
            faults.append(f"{linear.name}: the export lacks {key}")
            continue
        if codes.dtype == linear.weight.dtype and stored.ignored_by(linear.name):
            continue  # kept in high precision, judged with the plain tensors
        if codes.dtype != torch.float8_e4m3fn or codes.shape != linear.weight.shape:
            faults.append(f"{linear.name}: expected E4M3 {linear.weight.shape}, found {codes.dtype} {codes.shape}")
            continue
        weight_scale, fault = _scale(store, f"{linear.name}.weight_scale", stored.scale_shape(codes.shape))
        input_scale, more = None, ""
        if stored.static_inputs or f"{linear.name}.input_scale" in store.tensors:
            input_scale, more = _scale(store, f"{linear.name}.input_scale", (1,))
        if weight_scale is None or more:
            faults.append(f"{linear.name}: {fault or more}")
        else:
            pairs[linear.name] = (linear, StoredLinear(codes, weight_scale, input_scale))
    return pairs, faults


def training_codes(weight: Tensor, trained: Scale | None) -> tuple[Tensor, float]:
    """Return the codes [N, K] that training multiplied with, saturating, and their scale."""
    multiplier = trained.multiplier if trained else float(multiplier_for(amax(weight)))
    return quantize(weight, multiplier), float(reciprocal(multiplier))


def run_training(
    x_MK: Tensor, own: Scale, codes: Tensor, weight_scale: float, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Run one linear as training did: the input cast at the learned multiplier, float32 accumulation."""
    return scaled_mm(quantize(x_MK, own.multiplier), codes, own.value, weight_scale, bias, out_dtype)


def run_stored(export: StoredLinear, x_MK: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Run one exported linear as an engine does: quantise the input with 1 / input_scale, or per token when dynamic."""
    codes, weight_scale = export.codes.read().to(x_MK.device), export.weight_scale.to(x_MK.device)
    if export.input_scale is None:
        multipliers = multiplier_for(amax_rows(x_MK))
        return scaled_mm(quantize(x_MK, multipliers), codes, reciprocal(multipliers), weight_scale, bias, out_dtype)
    multiplier = float(reciprocal(export.input_scale))
    return scaled_mm(quantize(x_MK, multiplier), codes, float(export.input_scale), weight_scale, bias, out_dtype)
