"""The law of E4M3, against ml_dtypes and float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8export import kernels

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE_BF16 = ALL_BF16[torch.isfinite(ALL_BF16)]


def expected_codes(x: torch.Tensor, multiplier: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        product = x.float().numpy() * np.float32(multiplier)
    return np.clip(product, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@pytest.mark.parametrize("multiplier", [1.0, 104.642333984375, 2520.615478515625, 3.0517578125e-05, 1e20])
def test_every_bf16_value_is_cast_as_ml_dtypes_casts_it(multiplier: float) -> None:
    codes = kernels.quantize(FINITE_BF16, multiplier).view(torch.uint8).numpy()
    assert np.array_equal(codes, expected_codes(FINITE_BF16, multiplier))


@settings(max_examples=50, deadline=None)
@given(
    multiplier=st.floats(2.0**-40, 2.0**40, width=32),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 3000),
)
def test_any_shape_and_type_is_cast_in_float32(multiplier: float, dtype: torch.dtype, rows: int, columns: int) -> None:
    x = (torch.randn(rows, columns) * 448 / multiplier).clamp(-6e4, 6e4).to(dtype)
    codes = kernels.quantize(x, multiplier).view(torch.uint8).numpy()
    assert np.array_equal(codes, expected_codes(x, multiplier))


def test_a_column_of_multipliers_scales_each_row_alone() -> None:
    x = torch.randn(700, 1000)
    multipliers = torch.rand(700, 1) * 300
    codes = kernels.quantize(x, multipliers).view(torch.uint8)
    for row in (0, 1, 261, 262, 263, 699):
        alone = kernels.quantize(x[row], float(multipliers[row])).view(torch.uint8)
        assert torch.equal(codes[row], alone)


@pytest.mark.parametrize(
    ("value", "real"),
    [
        (1.0625, 1.0),
        (1.0625001, 1.125),
        (1.8131605, 1.875),
        (1.1875, 1.25),
        (400.199585, 416.0),
        (272.156555, 288.0),
        (2.0**-10, 0.0),
        (1.5 * 2.0**-9, 2.0**-8),
        (464.0, 448.0),
        (-900.0, -448.0),
    ],
)
def test_ties_go_to_even_and_overflow_saturates(value: float, real: float) -> None:
    assert float(kernels.quantize(torch.tensor([value]), 1.0).float()) == real


def test_rounding_alone_gives_448_up_to_464_and_only_beyond_is_a_code_clipped() -> None:
    x = torch.tensor([447.0, 448.1, 464.0, 464.1, -500.0, 0.0])
    assert kernels.count_clipped(x, 1.0) == 2


def test_all_finite_codes_survive_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(kernels.E4M3)
    for scale in (1.0, 0.25, 2.0**-7):
        back = kernels.quantize(kernels.dequantize(codes, scale), 1 / scale)
        assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


def test_nan_codes_are_seen_wherever_they_lie() -> None:
    codes = torch.zeros(3_000_000, dtype=torch.uint8)
    assert not kernels.has_nan_code(codes.view(kernels.E4M3))
    for value, place in ((0x7F, 0), (0xFF, 2_999_999)):
        bad = codes.clone()
        bad[place] = value
        assert kernels.has_nan_code(bad.view(kernels.E4M3))


@pytest.mark.parametrize("shape", [(1, 17, 16), (5, 3, 64), (64, 48, 160)])
def test_scaled_mm_is_float64_matmul_of_the_codes_to_float32_rounding(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a = kernels.quantize(torch.randn(m, k), 100.0)
    b = kernels.quantize(torch.randn(n, k), 50.0)
    scale_b, bias = torch.rand(n, 1) + 0.5, torch.randn(n)
    y = kernels.scaled_mm(a, b, 0.25, scale_b, bias, torch.float32)
    exact = (a.double() @ b.double().t()) * 0.25 * scale_b.double().t() + bias.double()
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().max()))


def test_amax_reports_nan_and_infinity() -> None:
    x = torch.randn(5, 7)
    assert kernels.amax(x) == float(x.abs().max())
    assert kernels.amax(torch.empty(0)) == 0
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = x.clone()
        broken[3, 3] = bad
        assert not np.isfinite(kernels.amax(broken))
        assert not torch.isfinite(kernels.amax_rows(broken)[3])


def test_a_zero_or_tiny_amax_still_gives_a_usable_scale() -> None:
    for largest in (0.0, 1e-45, 1e-38, 1e-20):
        multiplier = kernels.multiplier_for(largest)
        scale = kernels.reciprocal(multiplier)
        assert torch.isfinite(multiplier)
        assert float(scale) >= torch.finfo(torch.float32).tiny


def test_a_computed_multiplier_is_448_over_amax_rounded_once() -> None:
    amaxes = torch.rand(10_000) * 3 + 1e-3
    expected = np.float32(448) / amaxes.numpy()
    assert np.array_equal(kernels.multiplier_for(amaxes).numpy(), expected)
    assert float(kernels.multiplier_for(float(amaxes[0]))) == expected[0]
    assert np.array_equal(kernels.reciprocal(amaxes).numpy(), np.float32(1) / amaxes.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_no_function_changes_its_input(dtype: torch.dtype) -> None:
    x = torch.randn(40, 32).to(dtype)
    before = x.clone()
    kernels.quantize(x, 900.0)
    kernels.quantize(x, torch.full((40, 1), 900.0))
    kernels.count_clipped(x, 900.0)
    kernels.amax(x)
    kernels.amax_rows(x)
    assert torch.equal(x, before)
    codes = kernels.quantize(x, 9.0)
    kept = codes.view(torch.uint8).clone()
    kernels.dequantize(codes, 2.0)
    kernels.scaled_mm(codes, codes, 2.0, 3.0, out_dtype=torch.float32)
    assert torch.equal(codes.view(torch.uint8), kept)


def test_every_code_decodes_to_what_ml_dtypes_says() -> None:
    raw = np.arange(256, dtype=np.uint8)
    expected = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = kernels.dequantize(torch.from_numpy(raw).view(kernels.E4M3), 1.0).numpy()
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers])), "minus zero stays minus zero"
    assert torch.equal(
        kernels.decode(torch.from_numpy(raw[1:127]).view(kernels.E4M3).reshape(2, 63)),
        torch.from_numpy(expected[1:127]).reshape(2, 63),
    )
