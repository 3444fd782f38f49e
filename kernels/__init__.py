"""All arithmetic on FP8. Imports torch only, so that a training script can use it alone."""

from .reference import (
    E4M3,
    E4M3_MAX,
    SATURATES_ABOVE,
    amax,
    amax_rows,
    count_clipped,
    decode,
    dequantize,
    has_nan_code,
    multiplier_for,
    quantize,
    reciprocal,
    scaled_mm,
)

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "SATURATES_ABOVE",
    "amax",
    "amax_rows",
    "count_clipped",
    "decode",
    "dequantize",
    "has_nan_code",
    "multiplier_for",
    "quantize",
    "reciprocal",
    "scaled_mm",
]
