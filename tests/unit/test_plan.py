"""Decisions: what is quantised, how finely, with which scales, and what is refused."""

import pytest
from builders import llama

from fp8export import convert, inspect
from fp8export.errors import RequestError, ScaleError, UnsupportedError
from fp8export.model import Grain, Scheme
from fp8export.plan import make_plan
from fp8export.road import scales_for


@pytest.fixture
def checkpoint(tmp_path):
    return inspect(llama.te_fp8(tmp_path / "te"))


def shared_scales(tmp_path):
    state = llama.weights()
    return inspect(llama.write(tmp_path / "shared", {**state, **llama.states(state, shared=True)}))


def test_auto_is_per_channel_where_a_fused_set_learned_different_weight_scales(checkpoint) -> None:
    assert make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme()).grain is Grain.CHANNEL


def test_auto_is_per_tensor_where_each_fused_set_learned_one(tmp_path) -> None:
    checkpoint = shared_scales(tmp_path)
    assert make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme()).grain is Grain.TENSOR


def test_members_of_a_fused_set_share_the_largest_input_scale(tmp_path) -> None:
    state = llama.weights(layers=1)
    extra = llama.states(state)
    wide = llama.states(state, input_amax=12.0)
    key = "model.layers.0.self_attn.k_proj"
    extra[f"{key}._extra_state"] = wide[f"{key}._extra_state"]
    checkpoint = inspect(llama.write(tmp_path, {**state, **extra}, llama.config(1)))
    scales = scales_for(checkpoint, "learned")
    plan = make_plan(checkpoint, scales, Scheme())
    shared = {x.name.rpartition(".")[2]: x.input_scale.value for x in plan.linears}
    assert shared["q_proj"] == shared["k_proj"] == shared["v_proj"] == scales.inputs[key].value
    assert shared["o_proj"] == scales.inputs["model.layers.0.self_attn.o_proj"].value
    assert {note.where.rpartition(".")[2] for note in plan.notes if "raised" in note.text} == {"q_proj", "v_proj"}
    with pytest.raises(ScaleError, match="different input scales"):
        make_plan(checkpoint, scales, Scheme(strict=True))


def test_keep_is_closed_over_fused_sets(checkpoint) -> None:
    plan = make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme(keep=("*.0.self_attn.q_proj",)))
    kept = {name for name, reason in plan.kept.items() if "keep" in reason or "kept" in reason}
    assert kept == {f"model.layers.0.self_attn.{p}_proj" for p in "qkv"}
    assert not kept & {linear.name for linear in plan.linears}
    assert {f"{name}.weight" for name in kept} <= set(plan.plain)


@pytest.mark.parametrize("pattern", ["model.layers.9.*", "q_proj", "re:layers"])
def test_a_keep_pattern_that_matches_nothing_is_a_usage_error(checkpoint, pattern) -> None:
    with pytest.raises(RequestError, match="matches no layer"):
        make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme(keep=(pattern,)))


def test_a_keep_pattern_may_be_a_regular_expression(checkpoint) -> None:
    plan = make_plan(
        checkpoint, scales_for(checkpoint, "learned"), Scheme(keep=(r"re:.*layers\.1\.mlp\.(gate|up)_proj$",))
    )
    assert len(plan.linears) == 12
    with pytest.raises(RequestError, match="not a regular expression"):
        make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme(keep=("re:(",)))


def test_keeping_everything_is_refused(checkpoint) -> None:
    with pytest.raises(ScaleError, match="nothing is left"):
        make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme(keep=("*",)))


def test_dynamic_inputs_go_with_per_channel_weights_only(checkpoint) -> None:
    with pytest.raises(RequestError, match="per-channel"):
        make_plan(checkpoint, scales_for(checkpoint, "dynamic"), Scheme("dynamic", weights="tensor"))


def test_a_plain_checkpoint_has_no_static_scales_and_the_error_names_the_remedies(tmp_path) -> None:
    checkpoint = inspect(llama.hf_plain(tmp_path / "plain"))
    with pytest.raises(ScaleError) as caught:
        make_plan(checkpoint, scales_for(checkpoint, "learned"), Scheme())
    assert all(remedy in caught.value.hint for remedy in ("--scales dynamic", "calibration", "--keep"))


def test_sizes_that_no_fp8_gemm_takes_stay_in_high_precision(tmp_path) -> None:
    import torch

    state = llama.weights(layers=1)
    state["model.layers.0.mlp.extra_proj.weight"] = torch.randn(20, 32).bfloat16()
    checkpoint = inspect(llama.write(tmp_path, {**state, **llama.states(state)}, llama.config(1)))
    assert "not a multiple of 16" in checkpoint.plain_reasons["model.layers.0.mlp.extra_proj"]


def test_a_router_an_embedding_and_a_vision_tower_stay_in_high_precision(tmp_path) -> None:
    import torch

    state = llama.weights(layers=1)
    names = ("model.layers.0.mlp.gate", "model.visual.blocks.0.attn.qkv", "model.layers.0.embed_positions")
    state |= {f"{name}.weight": torch.randn(32, 32).bfloat16() for name in names}
    checkpoint = inspect(llama.write(tmp_path, state, llama.config(1)))
    assert set(names) <= set(checkpoint.plain_reasons)
    assert len(checkpoint.linears) == 7


def test_without_config_the_target_refuses_before_anything_is_written(tmp_path, example_state) -> None:
    import torch

    torch.save(example_state, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="--hf-config"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
