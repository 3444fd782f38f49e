"""What a checkpoint may look like, beyond the usual: prefixes, ties, experts, states of other formats."""

import pytest
import torch
from builders import llama, te

from fp8export import convert, inspect
from fp8export.calibrate import freeze
from fp8export.errors import CheckpointError, Fp8ExportError, ScaleError, UnsupportedError
from fp8export.store import open_store

DOWN = "model.layers.0.mlp.down_proj"


def trained(layers: int = 1) -> dict[str, torch.Tensor]:
    state = llama.weights(layers)
    return {**state, **llama.states(state)}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_are_taken_off_and_said(tmp_path, prefix) -> None:
    source = llama.write(tmp_path / "te", {prefix + key: value for key, value in trained().items()}, llama.config(1))
    checkpoint = inspect(source)
    assert len(freeze(checkpoint).inputs) == 7
    assert all(linear.name.startswith("model.") for linear in checkpoint.linears)
    assert any("prefix" in note.text for note in checkpoint.notes)
    convert(source, tmp_path / "out")


def test_both_names_of_a_tied_matrix_are_written_once(tmp_path) -> None:
    state = trained()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    import json

    (tmp_path / "config.json").write_text(json.dumps(llama.config(1, tie_word_embeddings=True)))
    done = convert(tmp_path, tmp_path.parent / "tied-out")
    assert "lm_head.weight" in done.checkpoint.ignored
    assert "lm_head.weight" not in open_store(done.out).tensors
    assert open_store(done.out).config["tie_word_embeddings"] is True


def test_a_tie_that_the_values_deny_is_undone(tmp_path) -> None:
    source = llama.write(tmp_path / "te", trained(), llama.config(1, tie_word_embeddings=True))
    done = convert(source, tmp_path / "out")
    assert open_store(done.out).config["tie_word_embeddings"] is False
    assert any("written untied" in note.text for note in done.checkpoint.notes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_learned_state_beside_a_weight_of_another_format_is_refused(tmp_path, dtype) -> None:
    state = trained()
    state[f"{DOWN}.weight"] = state[f"{DOWN}.weight"].float().to(dtype)
    with pytest.raises(CheckpointError, match="not a plain Linear"):
        inspect(llama.write(tmp_path / "te", state, llama.config(1)))


def test_a_bias_of_the_wrong_length_is_refused(tmp_path) -> None:
    state = trained() | {f"{DOWN}.bias": torch.ones(3)}
    with pytest.raises(CheckpointError, match="bias of"):
        inspect(llama.write(tmp_path / "te", state, llama.config(1)))


def test_stacked_experts_are_refused_before_anything_is_written(tmp_path) -> None:
    state = trained() | {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 32, 64).bfloat16()}
    source = llama.write(tmp_path / "te", state, llama.config(1))
    with pytest.raises(UnsupportedError, match="experts stacked"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["te"]


def test_a_named_source_ignores_the_other_ones_state_with_a_reason(tmp_path) -> None:
    source = llama.write(tmp_path / "te", trained(), llama.config(1))
    done = convert(source, tmp_path / "out", source_name="hf_plain", scales="dynamic")
    assert f"{DOWN}._extra_state" in done.checkpoint.ignored
    assert not any(key.endswith("_extra_state") for key in open_store(done.out).tensors)


def test_an_embedding_is_told_from_a_head_with_embed_in_its_name(tmp_path) -> None:
    state = llama.weights(layers=1)
    state["embed_out.weight"] = state.pop("lm_head.weight")
    state["model.visual.patch_embed.proj.weight"] = torch.randn(32, 32).bfloat16()
    done = convert(llama.write(tmp_path / "m", state, llama.config(1)), tmp_path / "out", scales="dynamic")
    ignore = open_store(done.out).config["quantization_config"]["ignore"]
    assert set(ignore) == {"embed_out", "model.visual.patch_embed.proj"}


def with_state(tmp_path, payload: dict) -> object:
    state = trained() | {f"{DOWN}._extra_state": te.as_u8(te.pickled(payload))}
    return llama.write(tmp_path / "te", state, llama.config(1))


HISTORY = [[0.0] * 3, [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]


def test_a_forward_in_e5m2_is_not_exported_as_e4m3(tmp_path) -> None:
    payload = te.delayed([57344.0, 57344.0, 1.0], HISTORY)
    payload["extra_fp8_variables"]["fp8_max_fwd"] = 57344
    with pytest.raises(ScaleError, match="only E4M3"):
        convert(with_state(tmp_path, payload), tmp_path / "out")


def test_a_scale_whose_inverse_is_infinite_is_refused_before_writing(tmp_path) -> None:
    with pytest.raises(ScaleError, match="unusable"):
        convert(with_state(tmp_path, te.delayed([1e-40, 100.0, 1.0], HISTORY)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["te"]


def test_a_scale_beyond_its_own_history_is_remarked(tmp_path) -> None:
    done = convert(with_state(tmp_path, te.delayed([4480.0, 100.0, 1.0], HISTORY)), tmp_path / "out")
    assert any("too large for its own amax history" in note.text for note in done.plan.notes)


@pytest.mark.parametrize(
    "change",
    [
        {"margin": -5000},
        {"margin": 10**6},
        {"margin": 1.5},
        {"scale_fwd": torch.ones(3, device="meta")},
        {"amax_history_fwd": torch.zeros(3, 3, device="meta")},
    ],
)
def test_a_damaged_state_is_a_checkpoint_error(tmp_path, change) -> None:
    payload = te.delayed([100.0, 100.0, 1.0], HISTORY)
    if "margin" in change:
        payload["recipe"].margin = change["margin"]
    else:
        payload |= change
    state: dict = trained()
    del payload["extra_fp8_variables"]
    if "margin" in change:
        state[f"{DOWN}._extra_state"] = te.as_u8(te.pickled(payload))
    else:
        del payload["recipe"]
        state[f"{DOWN}._extra_state"] = te.as_zip(payload)
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(Fp8ExportError) as caught:
        inspect(tmp_path / "m.pt")
    assert caught.value.exit_code == 4


def test_nan_anywhere_is_refused_and_infinity_in_a_mask_is_not(tmp_path) -> None:
    state = trained()
    state["model.norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"NaN[\s\S]*model\.norm\.weight"):
        convert(llama.write(tmp_path / "nan", state, llama.config(1)), tmp_path / "out")
    masked = trained() | {"model.mask": torch.full((4, 4), float("-inf"))}
    convert(llama.write(tmp_path / "mask", masked, llama.config(1)), tmp_path / "masked")


def test_the_same_archive_member_twice_is_refused(tmp_path) -> None:
    import warnings
    import zipfile

    file = tmp_path / "m.pt"
    torch.save({"w": torch.ones(4)}, file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("m/data/0", bytes(16))
    with pytest.raises(CheckpointError, match="two members"):
        open_store(file)


def test_floors_to_a_power_of_two_as_float32_logarithms_do() -> None:
    from fp8export.calibrate.freeze import updated

    for exponent in range(-10, 12):
        for step in (-3, -2, -1, 0, 1, 2, 3):
            amax = torch.tensor(448.0 / 2.0**exponent).view(torch.int32).add(step).view(torch.float32)
            expected = torch.exp2(torch.floor(torch.log2(torch.tensor(448.0) / amax)))
            assert updated(1.0, float(amax), 448.0, 0, floors=True) == float(expected)
