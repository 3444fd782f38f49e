"""Parity: what it must name, and the good exports that it must not fail."""

import json
from pathlib import Path

import pytest
import torch
from builders import llama
from builders.damage import edit_json, edit_tensors

from fp8export import convert, inspect, judge
from fp8export.model import ScaleSet
from fp8export.report import ParityReport
from fp8export.road import claimed_scales, scales_for

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama.te_fp8(tmp_path / "te")


def judged(source: Path, out: Path, depth: str = "weights", scales: str = "learned") -> ParityReport:
    checkpoint = inspect(source)
    return judge(checkpoint, scales_for(checkpoint, scales), out, depth=depth)


def set_tensor(key: str, value: torch.Tensor):
    return lambda out: edit_tensors(out / "model.safetensors", lambda state: state.__setitem__(key, value))


def set_config(**values):
    return lambda out: edit_json(out / "config.json", lambda content: content.update(values))


def make_dynamic(out: Path) -> None:
    edit_tensors(out / "model.safetensors", lambda s: [s.pop(key) for key in list(s) if key.endswith("input_scale")])
    edit_json(
        out / "config.json",
        lambda c: c["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(
            strategy="token", dynamic=True
        ),
    )


FAULTS = {
    "num_hidden_layers": set_config(num_hidden_layers=9),
    "rope_theta": set_config(rope_theta=5),
    "hidden_act": set_config(hidden_act="gelu"),
    "tie_word_embeddings": set_config(tie_word_embeddings=True),
    f"{Q}.bias": set_tensor(f"{Q}.bias", torch.ones(64)),
    "model.layers.7.input_layernorm.weight": set_tensor("model.layers.7.input_layernorm.weight", torch.ones(64)),
    "lm_head.weight": set_tensor("lm_head.weight", torch.zeros(256, 64).to(torch.float8_e4m3fn)),
    "model.norm.weight": set_tensor("model.norm.weight", torch.ones(3).to(torch.float8_e4m3fn)),
    "model.layers.1.input_layernorm.weight": set_tensor(
        "model.layers.1.input_layernorm.weight", torch.ones(64).bfloat16()
    ),
    Q: make_dynamic,
    f"{Q}: model.layers.0.self_attn.q_proj.input_scale is": set_tensor(f"{Q}.input_scale", torch.ones(2)),
    f"{Q}: model.layers.0.self_attn.q_proj.input_scale is not": set_tensor(
        f"{Q}.input_scale", torch.full((1,), float("inf"))
    ),
    f"{Q}: model.layers.0.self_attn.q_proj.weight_scale is": set_tensor(f"{Q}.weight_scale", torch.ones(64)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(source, tmp_path, name) -> None:
    convert(source, tmp_path / "out")
    FAULTS[name](tmp_path / "out")
    for depth in ("weights", "linears"):
        report = judged(source, tmp_path / "out", depth)
        assert not report.passed
        assert any(name in fault for fault in report.faults), report.faults


@pytest.mark.parametrize("depth", ["weights", "linears"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "tensor"},
        {"scales": "history-max"},
        {"scales": "dynamic"},
        {"keep": ("*.1.mlp.*",)},
        {"shard_size": 20_000},
    ],
)
def test_a_good_export_is_not_failed(source, tmp_path, options, depth) -> None:
    convert(source, tmp_path / "out", **options)
    policy = claimed_scales(tmp_path / "out")
    assert policy == options.get("scales", "learned")
    report = judged(source, tmp_path / "out", depth, policy)
    assert report.passed, report.faults


def test_an_input_scale_raised_for_its_fused_set_is_no_fault(tmp_path) -> None:
    state = llama.weights(layers=1)
    extra = llama.states(state)
    extra[f"{Q}._extra_state"] = llama.states(state, input_amax=6.6)[f"{Q}._extra_state"]
    source = llama.write(tmp_path / "te", {**state, **extra}, llama.config(1))
    convert(source, tmp_path / "out")
    for depth in ("weights", "linears"):
        report = judged(source, tmp_path / "out", depth)
        assert report.passed, report.faults
    found = {linear.name: linear.input_scale for linear in report.linears}
    assert found[Q] == "exact"
    assert found[Q.replace("q_proj", "k_proj")] == "unified"


def test_a_bias_is_part_of_the_layer(tmp_path) -> None:
    state = llama.weights(layers=1)
    state |= {
        f"model.layers.0.self_attn.{p}_proj.bias": torch.randn(n).bfloat16()
        for p, n in zip("qkv", (64, 32, 32), strict=True)
    }
    source = llama.write(tmp_path / "te", {**state, **llama.states(state)}, llama.config(1, attention_bias=True))
    convert(source, tmp_path / "out")
    assert judged(source, tmp_path / "out", "linears").passed
    edit_tensors(tmp_path / "out" / "model.safetensors", lambda s: s[f"{Q}.bias"].mul_(2))
    assert any(f"{Q}.bias" in fault for fault in judged(source, tmp_path / "out").faults)


def test_the_report_is_plain_json_with_a_version(source, tmp_path) -> None:
    convert(source, tmp_path / "out")
    content = json.loads(judged(source, tmp_path / "out", "linears").to_json())
    assert content["schema"] == 1
    assert content["passed"]
    assert len(content["linears"]) == 14


def test_the_worst_layers_come_first(source, tmp_path) -> None:
    convert(source, tmp_path / "out")
    set_tensor(f"{Q}.input_scale", torch.ones(1))(tmp_path / "out")
    edit_tensors(
        tmp_path / "out" / "model.safetensors", lambda s: s[f"{Q}.weight"].view(torch.uint8)[0].bitwise_xor_(1)
    )
    worst = judged(source, tmp_path / "out").worst()
    assert worst[0].name == Q
    assert worst[0].differing_codes == 64


def test_without_learned_scales_the_reference_is_high_precision(tmp_path) -> None:
    source = llama.hf_plain(tmp_path / "plain")
    convert(source, tmp_path / "out", scales="dynamic")
    report = judge(inspect(source), ScaleSet(), tmp_path / "out", depth="linears")
    assert report.passed
    assert "high-precision" in report.reference
    assert all(0.01 < linear.export_error < 0.06 for linear in report.linears if linear.export_error is not None)


def scaled_inputs(source: Path, file: Path, factor: float) -> Path:
    from fp8export.calibrate import freeze, save_scales

    content = json.loads(save_scales(freeze(inspect(source))))
    for item in content["inputs"].values():
        item["scale"] *= factor
        del item["multiplier"]
    file.write_text(json.dumps(content))
    return file


def test_the_reference_is_what_training_used_not_what_the_export_was_asked_to_hold(source, tmp_path) -> None:
    """A scale file that saturates the inputs is held faithfully by the export, and is still not the trained model."""
    file = scaled_inputs(source, tmp_path / "s.json", 1 / 16)
    convert(source, tmp_path / "out", scales=str(file))
    codes = judged(source, tmp_path / "out", "weights", str(file))
    assert codes.passed
    assert not any(linear.input_scale == "exact" for linear in codes.linears)
    report = judged(source, tmp_path / "out", "linears", str(file))
    assert len(report.faults) == 14
    assert all("from high precision, training was" in fault for fault in report.faults)


def test_recomputed_scales_are_not_called_exact(source, tmp_path) -> None:
    convert(source, tmp_path / "out", scales="most-recent")
    state = inspect(source)
    learned, recent = scales_for(state, "learned"), scales_for(state, "most-recent")
    report = judged(source, tmp_path / "out", "linears", "most-recent")
    for linear in report.linears:
        same = learned.inputs[linear.name].value == recent.inputs[linear.name].value
        assert linear.input_scale == ("exact" if same else "most-recent")
    # here the last amax was half of what the scale covers: inputs saturate, and the reader is told
    assert not report.passed
    assert max(linear.saturated_inputs or 0 for linear in report.linears) > 0


def test_input_scales_for_a_model_not_trained_in_fp8_are_judged_against_high_precision(tmp_path) -> None:
    source = llama.te_fp8(tmp_path / "te")
    plain = llama.hf_plain(tmp_path / "plain")
    file = scaled_inputs(source, tmp_path / "s.json", 1.0)
    convert(plain, tmp_path / "out", scales=str(file))
    report = judged(plain, tmp_path / "out", "linears", str(file))
    assert report.passed, report.faults
    assert "high-precision" in report.reference
