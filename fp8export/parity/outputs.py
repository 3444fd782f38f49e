"""The linears depth: every layer gets the same input in three forwards, so no error can hide behind another layer."""

import math

import torch
from torch import Tensor

from ..kernels import (
    E4M3_MAX,
    amax,
    count_clipped,
    dequantize,
    quantize,
    reciprocal,
)
from ..model import ScaleSet, TrainedLinear
from ..report import LinearParity
from .stored import StoredLinear, run_stored, run_training, training_codes

# Teacher-forced, the exported codes and scales reproduce the trained layer to the rounding of its output (1e-3 against
# real Transformer Engine outputs); plain high-precision weights miss by 1e-2 or more.
OUTPUT_TOLERANCE = 2e-3
# a requantised layer may be this much farther from high precision than training was
_REQUANTISED_FACTOR = 1.25
_DYNAMIC_TOLERANCE = 0.06  # twice the error of one E4M3 x E4M3 product of Gaussian data
_ROWS = 64


def draw_inputs(source: TrainedLinear, scales: ScaleSet) -> Tensor:
    """Normal inputs whose largest value is about the amax that training saw, the same in every run."""
    generator = torch.Generator().manual_seed(sum(source.name.encode()))
    x_MK = torch.randn(_ROWS, source.weight.shape[1], generator=generator)
    scale = scales.inputs.get(source.name)
    peak = E4M3_MAX * scale.value if scale else 4.0
    return x_MK.mul_(peak / float(x_MK.abs().max())).to(torch.bfloat16)


def judge_output(
    linear: LinearParity, source: TrainedLinear, export: StoredLinear, scales: ScaleSet, x_MK: Tensor, device: str
) -> None:
    x_MK, weight = x_MK.to(device), source.weight.read().to(device)
    bias = None if source.bias is None else source.bias.read().to(device)
    high = x_MK.float() @ weight.float().t() + (0 if bias is None else bias.float())
    own = scales.inputs.get(source.name)
    if own is not None:
        reference = run_training(
            x_MK, own, *training_codes(weight, scales.weights.get(source.name)), bias, torch.float32
        )
    else:
        reference = high
    exported = run_stored(export, x_MK, bias, torch.float32)
    linear.output_error = _relative(exported, reference)
    linear.training_error = _relative(reference, high)
    linear.export_error = _relative(exported, high)
    if export.input_scale is not None:
        multiplier = float(reciprocal(export.input_scale))
        peak = amax(x_MK)
        linear.saturated_inputs = count_clipped(x_MK, multiplier) / x_MK.numel()
        zeros = dequantize(quantize(x_MK, multiplier), 1.0) == 0
        linear.flushed_inputs = float((zeros & (x_MK != 0)).float().mean())
        linear.headroom_bits = round(math.log2(E4M3_MAX / (peak * multiplier)), 2) + 0.0 if peak else math.inf


def outside_tolerance(linear: LinearParity) -> str:
    """Say what is wrong with a judged layer; empty when it is within tolerance. NaN fails every comparison."""
    if linear.output_error is None or linear.training_error is None or linear.export_error is None:
        return ""
    # dynamic inputs, or a reference in high precision: no training-time error to compare with
    if linear.input_scale == "dynamic" or linear.training_error == 0:
        if linear.export_error <= _DYNAMIC_TOLERANCE:
            return ""
        return f"output error {linear.export_error:.2e} above {_DYNAMIC_TOLERANCE:.0e}"
    # anything else was changed for a stated reason: then it may not be much worse than training was
    if linear.exactness == linear.input_scale == "exact":
        if linear.output_error <= OUTPUT_TOLERANCE:
            return ""
        return f"output error {linear.output_error:.2e} above {OUTPUT_TOLERANCE:.0e}"
    if linear.export_error <= max(OUTPUT_TOLERANCE, _REQUANTISED_FACTOR * linear.training_error):
        return ""
    return f"{linear.export_error:.2e} from high precision, training was {linear.training_error:.2e}"


def _relative(a: Tensor, b: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(b.double()))
    return float(torch.linalg.vector_norm(a.double() - b.double())) / norm if norm else 0.0
