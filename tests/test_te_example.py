"""The promise, on a real checkpoint: what lies on disk is what Transformer Engine trained."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from builders.damage import edit_tensors, tensors_of
from builders.te import scale_of

from fp8export import inspect, judge
from fp8export.road import scales_for

LINEARS = [
    f"model.layers.{i}.{name}"
    for i in range(4)
    for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
]


@pytest.fixture(scope="module")
def on_disk(exported: Path) -> dict[str, torch.Tensor]:
    return tensors_of(exported / "model.safetensors")


def test_every_weight_byte_is_the_cast_of_the_stored_weight_at_its_learned_scale(on_disk, example_state) -> None:
    for name in LINEARS:
        multiplier = scale_of(example_state[f"{name}._extra_state"])[1].numpy()
        product = example_state[f"{name}.weight"].double().numpy() * np.float64(multiplier)
        # float64 holds the exact product; rounding it to float32 first is the law
        codes = np.clip(product.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.abs(product).max() <= 464, "no learned scale of this run clips"
        assert np.array_equal(on_disk[f"{name}.weight"].view(torch.uint8).numpy(), codes), name


def test_every_scale_is_the_float32_reciprocal_of_the_learned_one(on_disk, example_state) -> None:
    for name in LINEARS:
        scale_fwd = scale_of(example_state[f"{name}._extra_state"]).numpy()
        inverse = np.float32(1) / scale_fwd
        assert on_disk[f"{name}.input_scale"].numpy().tobytes() == inverse[:1].tobytes(), name
        rows = on_disk[f"{name}.weight_scale"].numpy()
        assert rows.tobytes() == np.full(rows.shape, inverse[1]).tobytes(), name


def test_everything_else_passes_through_to_the_byte(on_disk, example_state) -> None:
    plain = [key for key in example_state if key.removesuffix(".weight") not in LINEARS and "_extra" not in key]
    assert len(plain) == 11
    for key in plain:
        assert torch.equal(on_disk[key].view(torch.int16), example_state[key].view(torch.int16)), key
    assert set(on_disk) == {*plain, *(f"{n}.{p}" for n in LINEARS for p in ("weight", "weight_scale", "input_scale"))}


def teacher_forced_error(on_disk: dict[str, torch.Tensor], layer_io: dict[str, torch.Tensor], name: str) -> float:
    """Relative error against Transformer Engine's recorded output, by float64 arithmetic of this test alone."""
    scale = on_disk[f"{name}.input_scale"].double()
    x = layer_io[f"{name}.input"].float().numpy() * (np.float32(1) / on_disk[f"{name}.input_scale"].numpy())
    codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    weight = on_disk[f"{name}.weight"].double() * on_disk[f"{name}.weight_scale"].double()
    # the recorded output is BF16, so the exact product is rounded once as well
    y = ((torch.from_numpy(codes) * scale) @ weight.t()).bfloat16().double()
    recorded = layer_io[f"{name}.output"].double()
    return float((y - recorded).norm() / recorded.norm())


LAYER_0 = LINEARS[:7]


def test_each_layer_reproduces_its_recorded_output(on_disk, layer_io, example_state) -> None:
    for name in LAYER_0:
        assert teacher_forced_error(on_disk, layer_io, name) < 2e-3, name
        plain = layer_io[f"{name}.input"].double() @ example_state[f"{name}.weight"].double().t()
        recorded = layer_io[f"{name}.output"].double()
        assert float((plain - recorded).norm() / recorded.norm()) > 1e-2, "BF16 weights must be clearly worse"


def halve_input_scale(state: dict[str, torch.Tensor], name: str) -> None:
    state[f"{name}.input_scale"] = state[f"{name}.input_scale"] / 2


def change_weight_scale(state: dict[str, torch.Tensor], name: str) -> None:
    state[f"{name}.weight_scale"] = state[f"{name}.weight_scale"] * 1.01


def change_row(state: dict[str, torch.Tensor], name: str) -> None:
    state[f"{name}.weight"].view(torch.uint8)[7] ^= 0x80


def swap_gate_up(state: dict[str, torch.Tensor], name: str) -> None:
    gate, up = name.replace("up_proj", "gate_proj"), name.replace("gate_proj", "up_proj")
    for part in ("weight", "weight_scale"):
        state[f"{gate}.{part}"], state[f"{up}.{part}"] = state[f"{up}.{part}"], state[f"{gate}.{part}"]


FAULTS = [
    # the recorded inputs of these layers reach beyond half of the learned amax, so they clip
    (halve_input_scale, "model.layers.0.mlp.gate_proj"),
    (halve_input_scale, "model.layers.0.self_attn.o_proj"),
    (halve_input_scale, "model.layers.0.self_attn.q_proj"),
    (change_weight_scale, "model.layers.0.self_attn.k_proj"),
    (change_row, "model.layers.0.self_attn.o_proj"),
    (swap_gate_up, "model.layers.0.mlp.gate_proj"),
]


@pytest.mark.parametrize(("plant", "name"), FAULTS)
def test_a_planted_fault_fails_teacher_forcing(export_copy, layer_io, plant, name) -> None:
    edit_tensors(export_copy / "model.safetensors", lambda state: plant(state, name))
    damaged = tensors_of(export_copy / "model.safetensors")
    assert teacher_forced_error(damaged, layer_io, name) > 2e-3


@pytest.mark.parametrize("depth", ["weights", "linears"])
@pytest.mark.parametrize(("plant", "name"), FAULTS)
def test_a_planted_fault_is_named_by_parity(example, export_copy, plant, name, depth) -> None:
    edit_tensors(export_copy / "model.safetensors", lambda state: plant(state, name))
    checkpoint = inspect(example)
    report = judge(checkpoint, scales_for(checkpoint, "learned"), export_copy, depth=depth)
    assert not report.passed
    assert any(fault.startswith(name) for fault in report.faults)


def test_an_input_scale_halved_in_a_later_layer_is_named_too(example, export_copy) -> None:
    name = "model.layers.3.mlp.up_proj"

    def plant(state: dict[str, torch.Tensor]) -> None:
        state[f"{name}.input_scale"] = state[f"{name}.input_scale"] / 2

    edit_tensors(export_copy / "model.safetensors", plant)
    checkpoint = inspect(example)
    report = judge(checkpoint, scales_for(checkpoint, "learned"), export_copy)
    assert [fault.partition(":")[0] for fault in report.faults] == [name]


def test_the_good_export_passes_at_every_depth_without_data(example, exported) -> None:
    checkpoint = inspect(example)
    scales = scales_for(checkpoint, "learned")
    for depth in ("weights", "linears"):
        report = judge(checkpoint, scales, exported, depth=depth)
        assert report.passed
        assert report.exact == 28
