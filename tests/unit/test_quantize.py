"""One fused set in, codes and scales out: learned scales kept, outgrown ones recomputed, sets unified."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8export.errors import CheckpointError, ScaleError
from fp8export.model import Grain, How, LazyTensor, QuantizedLinear, Scale
from fp8export.quantize import quantize_set


def lazy(tensor: torch.Tensor, name: str = "file::w") -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, name, lambda lo, hi: tensor[lo:hi].clone())


def learned(multiplier: float) -> Scale:
    m = torch.tensor(multiplier)
    return Scale(float(torch.ones(()) / m), float(m), How.LEARNED, "state")


def run(weights: dict[str, torch.Tensor], scales: dict[str, float | None], grain: Grain, *, strict=False, static=True):
    out: dict[str, torch.Tensor] = {}

    def sink(name: str, row: int, rows: torch.Tensor) -> None:
        whole = out.get(name)
        if whole is None or len(whole) < row + len(rows):
            grown = torch.zeros((row + len(rows), *rows.shape[1:]), dtype=rows.dtype)
            if whole is not None:
                grown.view(torch.uint8)[: len(whole)] = whole.view(torch.uint8)
            whole = out[name] = grown
        whole[row : row + len(rows)] = rows

    members = tuple(
        QuantizedLinear(
            name,
            lazy(w, f"file::{name}"),
            None,
            "set",
            learned(scales[name]) if scales[name] else None,
            learned(10.0) if static else None,
        )
        for name, w in weights.items()
    )
    records = quantize_set(members, grain, strict, sink)
    return out, {record["linear"]: record["weight"] for record in records}


def cast(w: torch.Tensor, multiplier) -> np.ndarray:
    product = w.float().numpy() * np.float32(multiplier)
    return np.clip(product, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def codes(out: dict, name: str) -> np.ndarray:
    return out[f"{name}.weight"].view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_learned_scale_is_used_to_the_bit_and_replicated_per_channel(dtype) -> None:
    w = (torch.randn(48, 32) * 0.1).to(dtype)
    out, records = run({"q": w}, {"q": 901.7}, Grain.CHANNEL)
    assert np.array_equal(codes(out, "q"), cast(w, np.float32(901.7)))
    assert out["q.weight_scale"].shape == (48, 1)
    assert torch.equal(out["q.weight_scale"], (torch.ones(()) / torch.tensor(901.7)).expand(48, 1))
    assert records["q"]["how"] == "learned"


def test_values_that_round_to_448_are_not_clipped() -> None:
    w = torch.full((16, 16), 1.0)
    w[0, 0] = 463.0 / 448
    out, records = run({"q": w}, {"q": 448.0}, Grain.TENSOR)
    assert records["q"]["how"] == "learned"
    assert float(out["q.weight"][0, 0].float()) == 448


def test_a_weight_that_outgrew_its_scale_gets_a_new_one_and_is_reported() -> None:
    w = torch.randn(64, 32).bfloat16()
    w[5, 5] = 7.0
    out, records = run({"q": w}, {"q": 128.0}, Grain.TENSOR)
    assert out["q.weight_scale"].tolist() == [7 / 448]
    assert records["q"]["how"].startswith("recomputed")
    assert records["q"]["clipped_at_learned_scale"] == int((w.float().abs() * 128 > 464).sum()) / w.numel()
    assert np.array_equal(codes(out, "q"), cast(w, 64.0))
    with pytest.raises(ScaleError, match="would clip"):
        run({"q": w}, {"q": 128.0}, Grain.TENSOR, strict=True)


def test_per_channel_only_the_outgrown_member_changes() -> None:
    grown, other = torch.randn(32, 32).bfloat16(), torch.randn(16, 32).bfloat16() * 0.5
    grown[0, 0] = 20.0
    out, records = run({"q": grown, "k": other}, {"q": 100.0, "k": 90.0}, Grain.CHANNEL)
    assert records["q"]["how"].startswith("recomputed")
    assert records["k"]["how"] == "learned"
    assert np.array_equal(codes(out, "k"), cast(other, 90.0))


def test_per_tensor_a_fused_set_takes_its_largest_scale_and_is_cast_again_from_the_weight() -> None:
    q, k = torch.randn(32, 32).bfloat16(), torch.randn(16, 32).bfloat16() * 0.5
    out, records = run({"q": q, "k": k}, {"q": 100.0, "k": 200.0}, Grain.TENSOR)
    assert torch.equal(out["q.weight_scale"], out["k.weight_scale"])
    assert np.array_equal(codes(out, "q"), cast(q, 100.0))
    assert np.array_equal(codes(out, "k"), cast(k, 100.0))
    assert records["q"]["how"] == "learned"
    assert records["k"]["how"] == "unified with its fused set"


def test_per_tensor_the_clipped_share_is_that_at_the_learned_scale() -> None:
    q, k = torch.randn(32, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    _, records = run({"q": q, "k": k}, {"q": 90.0, "k": 400.0}, Grain.TENSOR)
    expected = int((k.float().abs() * 400 > 464).sum()) / k.numel()
    assert records["k"]["clipped_at_learned_scale"] == expected > 0


def test_per_tensor_an_outgrown_member_lifts_the_whole_set() -> None:
    q, k = torch.randn(32, 32).bfloat16(), torch.randn(16, 32).bfloat16() * 0.5
    q[3, 3] = 56.0
    out, _ = run({"q": q, "k": k}, {"q": 100.0, "k": 200.0}, Grain.TENSOR)
    assert out["q.weight_scale"].tolist() == out["k.weight_scale"].tolist() == [0.125]
    assert np.array_equal(codes(out, "k"), cast(k, 8.0))


def test_requantising_to_a_larger_scale_costs_one_rounding_not_the_ratio() -> None:
    q, k = torch.randn(64, 64), torch.randn(64, 64)
    out, _ = run({"q": q, "k": k}, {"q": 100.0, "k": 125.0}, Grain.TENSOR)
    real = out["k.weight"].float() * out["k.weight_scale"]
    assert float((real - k).norm() / k.norm()) < 0.03


def test_dynamic_gives_each_row_its_own_scale() -> None:
    w = torch.randn(40, 32).bfloat16() * torch.logspace(-3, 2, 40)[:, None]
    w = w.bfloat16()
    w[7] = 0
    out, records = run({"q": w}, {"q": None}, Grain.CHANNEL, static=False)
    amax = w.float().abs().amax(1, keepdim=True)
    multiplier = torch.where(amax > 0, torch.full_like(amax, 448) / amax.clamp(min=1e-30), torch.ones_like(amax))
    assert torch.equal(out["q.weight_scale"], torch.ones(()) / multiplier)
    assert np.array_equal(codes(out, "q"), cast(w, multiplier.numpy()))
    assert not out["q.weight"][7].float().any()
    assert records["q"]["how"] == "computed for each row"
    assert "q.input_scale" not in out


def test_an_all_zero_weight_gets_zero_codes_and_a_positive_scale() -> None:
    out, _ = run({"q": torch.zeros(16, 16)}, {"q": None}, Grain.TENSOR)
    assert not codes(out, "q").any()
    assert float(out["q.weight_scale"]) > 0


@pytest.mark.parametrize("grain", [Grain.TENSOR, Grain.CHANNEL])
def test_a_float32_weight_that_outgrew_its_scale_is_cast_from_its_own_values(grain) -> None:
    w = torch.randn(64, 32)
    out, records = run({"q": w}, {"q": 300.0}, grain)
    assert records["q"]["how"].startswith("recomputed")
    assert np.array_equal(codes(out, "q"), cast(w, np.float32(448) / np.float32(w.abs().max())))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("grain", "static"), [(Grain.TENSOR, True), (Grain.CHANNEL, True), (Grain.CHANNEL, False)])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad, grain, static) -> None:
    w = torch.randn(32, 32)
    w[31, 31] = bad
    for scale in (100.0, None):
        with pytest.raises(CheckpointError, match=r"NaN or infinity[\s\S]*file::q"):
            run({"q": w}, {"q": scale if static else None}, grain, static=static)


def test_a_weight_of_many_chunks_equals_one_pass() -> None:
    w = torch.randn(3000, 4096).bfloat16()  # 24 MB, several chunks
    out, _ = run({"q": w}, {"q": 70.3}, Grain.CHANNEL)
    assert np.array_equal(codes(out, "q"), cast(w, np.float32(70.3)))
