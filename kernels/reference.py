"""The law: what an E4M3 code is, in plain torch.

Dimension letters: M tokens, N outputs, K inputs. A *scale* gives real = code * scale; a *multiplier* is what the value
was multiplied by before the cast. The two are each other's float32 reciprocal, which is not exact both ways, so the
cast always takes the multiplier that the trainer used.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# 448 is the last code of its binade (spacing 32) and 464 the tie to the missing 480, which goes to the even 448.
# Up to here rounding alone gives 448; above, only saturation does, and the error exceeds half a step.
SATURATES_ABOVE = 464.0
# Below this an amax tells nothing: 448 / amax would overflow float32, or its reciprocal leave the normal range.
_SMALLEST_AMAX = 1e-30
# In-place passes over a buffer that stays in the cache are 7 to 18 times faster than whole-tensor temporaries.
_CHUNK = 1 << 18


def quantize(x: Tensor, multiplier: float | Tensor, out: Tensor | None = None) -> Tensor:
    """Cast to E4M3: float32 product, saturate at 448, round to nearest even.

    Shapes: x [N, K] or any; multiplier a float32-exact float, or [N, 1] for a matrix. NaN becomes the NaN code and
    infinity 448, so callers check finiteness first. The explicit clamp makes the result independent of the torch
    version: casts before 2.12 turn overflow into NaN.
    """
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device) if out is None else out
    rows = x.reshape(-1) if isinstance(multiplier, float) else x
    target = codes.reshape(-1) if isinstance(multiplier, float) else codes
    step = _CHUNK if rows.ndim == 1 else max(1, _CHUNK // max(1, rows.shape[1]))
    buffer = torch.empty((min(step, len(rows)), *rows.shape[1:]), dtype=torch.float32, device=x.device)
    for lo in range(0, len(rows), step):
        part = buffer[: min(step, len(rows) - lo)]
        part.copy_(rows[lo : lo + step])
        part.mul_(multiplier if isinstance(multiplier, float) else multiplier[lo : lo + step])
        part.clamp_(-E4M3_MAX, E4M3_MAX)
        target[lo : lo + step].copy_(part)
    return codes


def dequantize(codes: Tensor, scale: float | Tensor) -> Tensor:
    """Return code * scale in float32. Shapes: codes [N, K]; scale a float, [1] or [N, 1]."""
    return decode(codes).mul_(scale)


def decode(codes: Tensor) -> Tensor:
    """Return the float32 value of each E4M3 code.

    An E4M3 code shifted by seven bits is a float16 with an exponent bias of 15 instead of 7: the same number divided by
    2^8, subnormals included. torch's own conversion gives the same values five times slower on a CPU.
    """
    half = codes.view(torch.int8).to(torch.int16)
    # the sign is shifted down with the rest and leaves a copy of itself in the top bit of the exponent
    half = half.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    real = half.view(torch.float16).to(torch.float32).mul_(256.0)
    return real.masked_fill_(_is_nan(codes), torch.nan) if has_nan_code(codes) else real


def _is_nan(codes: Tensor) -> Tensor:
    return (codes.view(torch.uint8) & 0x7F) == 0x7F


def scaled_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: float | Tensor,
    scale_b: float | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply two code matrices, [M, K] x [N, K] -> [M, N], with exact products and float32 accumulation.

    scale_a: float, [1] or [M, 1]; scale_b: float, [1] or [N, 1]. Scales and bias [N] are applied in float32 and the
    result is rounded once.
    """
    columns = scale_b if isinstance(scale_b, float) else scale_b.reshape(1, -1)
    y_MN = decode(a_MK) @ decode(b_NK).t()
    y_MN = y_MN.mul_(scale_a).mul_(columns)
    if bias is not None:
        y_MN = y_MN.add_(bias.to(torch.float32))
    return y_MN.to(out_dtype)


def amax(x: Tensor) -> float:
    """Return the largest magnitude; NaN or infinity when x holds one. An empty tensor gives 0."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)
    # -low before max: NaN survives torch.maximum, unlike Python's max
    return float(torch.maximum(-low.float(), high.float()))


def amax_rows(x_NK: Tensor) -> Tensor:
    """Return the largest magnitude of each row, float32 [N, 1]."""
    low, high = torch.aminmax(x_NK, dim=1, keepdim=True)
    return torch.maximum(-low.float(), high.float())


def multiplier_for(largest: float | Tensor) -> Tensor:
    """Return the float32 multiplier that maps an amax to 448. A zero amax gives 1."""
    value = torch.as_tensor(largest, dtype=torch.float32)
    # tensor by tensor: torch turns number / tensor into a product with the reciprocal, which rounds twice
    quotient = torch.full_like(value, E4M3_MAX) / value.clamp(min=_SMALLEST_AMAX)
    return torch.where(value > 0, quotient, torch.ones_like(value))


def reciprocal(value: float | Tensor) -> Tensor:
    """Return 1 / value in float32, the only way between a scale and its multiplier."""
    return torch.ones((), dtype=torch.float32) / torch.as_tensor(value, dtype=torch.float32)


def count_clipped(x: Tensor, multiplier: float) -> int:
    """Count the elements whose code is set by saturation, not by rounding."""
    product = x.to(torch.float32) * multiplier
    return int(torch.count_nonzero(product.abs_() > SATURATES_ABOVE))


def has_nan_code(codes: Tensor) -> bool:
    """Tell whether E4M3 codes hold 0x7F or 0xFF, the two NaNs."""
    raw = codes.view(torch.uint8).reshape(-1)
    step = _CHUNK * 4
    return any(int((raw[lo : lo + step] & 0x7F).max()) == 0x7F for lo in range(0, len(raw), step))
