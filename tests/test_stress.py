"""Nineteen ways a real checkpoint can be odd: eleven are refused, eight are converted and explained."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from builders import stress
from builders.damage import tensors_of
from click.testing import CliRunner

from fp8export.cli import main


def write_variant(folder: Path, example: Path, state: dict) -> Path:
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    shutil.copy(example / "config.json", folder)
    return folder


def fresh(example_state: dict) -> dict:
    return {key: value.clone() for key, value in example_state.items()}


@pytest.mark.parametrize("name", stress.REFUSED)
def test_refused_with_a_clear_error_and_nothing_written(name, example, example_state, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    edit, named, exit_code = stress.REFUSED[name]
    state = fresh(example_state)
    edit(state)
    source = write_variant(tmp_path / name, example, state)
    result = CliRunner().invoke(main, ["convert", str(source)])
    assert result.exit_code == exit_code, result.output
    assert named in result.stderr
    assert "where:" in result.stderr
    assert "what to do:" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path)) == [name], "nothing written, nothing executed"


@pytest.mark.parametrize("name", ["never_ran_zeros", "never_ran_empty", "missing_extra_state"])
def test_a_layer_without_scales_is_told_the_three_remedies_and_each_works(
    name, example, example_state, tmp_path
) -> None:
    state = fresh(example_state)
    stress.REFUSED[name][0](state)
    source = write_variant(tmp_path / name, example, state)
    run = CliRunner().invoke
    message = run(main, ["convert", str(source)]).stderr
    assert all(remedy in message for remedy in ("--scales dynamic", "calibration", "--keep PATTERN"))
    assert run(main, ["convert", str(source), "-o", str(tmp_path / "a"), "--scales", "dynamic"]).exit_code == 0
    assert run(main, ["convert", str(source), "-o", str(tmp_path / "b"), "--keep", stress.UP]).exit_code == 0
    kept = tensors_of(tmp_path / "b" / "model.safetensors")
    gate = stress.UP.replace("up_proj", "gate_proj")
    assert kept[f"{stress.UP}.weight"].dtype == kept[f"{gate}.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", stress.CONVERTED)
def test_converted_with_the_right_scale_and_a_line_of_explanation(name, example, example_state, tmp_path) -> None:
    edit, words = stress.CONVERTED[name]
    state = fresh(example_state)
    edit(state)
    source = write_variant(tmp_path / name, example, state)
    result = CliRunner().invoke(main, ["convert", str(source)])
    assert result.exit_code == 0, result.output
    assert words in result.stdout
    written = tensors_of(tmp_path / f"{name}-fp8" / "model.safetensors")
    for key in example_state:
        if not key.endswith("._extra_state"):
            continue
        module = key.removesuffix("._extra_state")
        inverse = torch.ones(()) / stress.scales_in(state, module)
        assert torch.equal(written[f"{module}.input_scale"], inverse[:1]), module
        if name == "weight_outgrew_scale" and module == stress.KEY:
            amax = state[f"{module}.weight"].abs().max().float()
            refit = torch.ones(()) / (torch.tensor(448.0) / amax)
            assert torch.equal(written[f"{module}.weight_scale"], refit.expand_as(written[f"{module}.weight_scale"]))
            assert float(written[f"{module}.weight"][0, 0].float()) == 448
        else:
            assert torch.equal(
                written[f"{module}.weight_scale"], inverse[1].expand_as(written[f"{module}.weight_scale"])
            )


def test_strict_refuses_a_weight_that_outgrew_its_scale(example, example_state, tmp_path) -> None:
    state = fresh(example_state)
    stress.weight_outgrew_scale(state)
    source = write_variant(tmp_path / "grown", example, state)
    result = CliRunner().invoke(main, ["convert", str(source), "--strict"])
    assert result.exit_code == 4
    assert f"{stress.KEY}.weight" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["grown"]
