"""The command line: what goes where, exit codes, and no traceback for a user's mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import llama, te
from builders.damage import edit_tensors
from click.testing import CliRunner
from safetensors.torch import save_file

from fp8export.cli import main


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama.te_fp8(tmp_path / "te")


def test_convert_alone_does_the_whole_job(source, tmp_path) -> None:
    result = run("convert", source)
    assert result.exit_code == 0, result.output
    out = tmp_path / "te-fp8"
    assert (out / "config.json").is_file()
    for words in ("14 linears", "lm_head", "verify: passed", "14 of 14 linears exact", f"vllm serve {out}"):
        assert words in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("depth", ["off", "weights", "linears"])
def test_json_is_the_only_thing_on_stdout(source, tmp_path, depth) -> None:
    result = run("convert", source, "--json", "--parity", depth)
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["verify"]["passed"]
    assert (content["parity"] is None) == (depth == "off")
    assert len(content["linears"]) == 14


def test_a_dry_run_prints_the_layout_and_writes_nothing(source, tmp_path) -> None:
    result = run("convert", source, "--dry-run")
    assert result.exit_code == 0
    assert "nothing was written" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["te"]
    content = json.loads(run("convert", source, "--dry-run", "--json").stdout)
    real = run("convert", source)
    assert real.exit_code == 0
    written = sum(p.stat().st_size for p in (tmp_path / "te-fp8").glob("*.safetensors"))
    assert content["bytes"] == written
    assert "model.layers.0.self_attn.q_proj.weight_scale" in content["files"]["model.safetensors"]


def test_freeze_writes_scales_that_convert_uses_to_the_same_bytes(source, tmp_path) -> None:
    file = tmp_path / "scales.json"
    assert run("freeze", source, "-o", file).exit_code == 0
    assert run("convert", source, "-o", tmp_path / "a").exit_code == 0
    assert run("convert", source, "-o", tmp_path / "b", "--scales", file).exit_code == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert run("parity", source, tmp_path / "b", "--scales", file).exit_code == 0


def test_an_edited_scale_file_is_what_is_exported(source, tmp_path) -> None:
    file = tmp_path / "scales.json"
    run("freeze", source, "-o", file)
    content = json.loads(file.read_text())
    name = "model.layers.1.mlp.down_proj"
    content["inputs"][name] = {"scale": 0.125}
    file.write_text(json.dumps(content))
    assert run("convert", source, "--scales", file, "-o", tmp_path / "out").exit_code == 0
    from builders.damage import tensors_of

    assert tensors_of(tmp_path / "out" / "model.safetensors")[f"{name}.input_scale"].tolist() == [0.125]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["inputs"]["model.layers.0.mlp.up_proj"].update(scale=0.0),
        lambda c: c["inputs"]["model.layers.0.mlp.up_proj"].update(scale=float("nan")),
        lambda c: c["inputs"]["model.layers.0.mlp.up_proj"].update(scale=-1.0),
        lambda c: c["inputs"]["model.layers.0.mlp.up_proj"].update(scale=0.5),
        lambda c: c["inputs"]["model.layers.0.mlp.up_proj"].update(scale="much"),
        lambda c: c.update(version=99),
        lambda c: c.pop("weights"),
        lambda c: c.update(inputs=[1]),
    ],
)
def test_a_bad_scale_file_is_refused(source, tmp_path, change) -> None:
    file = tmp_path / "scales.json"
    run("freeze", source, "-o", file)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    result = run("convert", source, "--scales", file)
    assert result.exit_code == 4, result.output
    assert str(file) in result.stderr


def test_scales_of_another_checkpoint_are_refused(source, tmp_path) -> None:
    file = tmp_path / "scales.json"
    run("freeze", source, "-o", file)
    file.write_text(file.read_text().replace("layers.1", "layers.7"))
    assert run("convert", source, "--scales", file).exit_code == 2


def test_weights_tensor_reports_what_each_unified_layer_lost(source, tmp_path) -> None:
    result = run("convert", source, "--weights", "tensor", "--json")
    assert result.exit_code == 0, result.output
    layers = {x["name"]: x for x in json.loads(result.stdout)["parity"]["linears"]}
    unified = [x for x in layers.values() if x["why"].startswith("unified")]
    assert unified
    assert all(x["exactness"] == "requantised" and 20 < x["sqnr_db"] < 40 and x["relative_error"] > 0 for x in unified)


def test_inspect_tells_recipe_layers_and_health(source) -> None:
    result = run("inspect", source)
    assert result.exit_code == 0
    for words in ("te_fp8", "delayed scaling", "14 linears, 14 with training state", "fit to be frozen"):
        assert words in result.stdout
    content = json.loads(run("inspect", source, "--json").stdout)
    assert content["findings"] == []
    assert all(x["learned"] for x in content["linears"])


SICK = {
    "no state": lambda s, n: s.pop(f"{n}._extra_state"),
    "never updated": lambda s, n: s.__setitem__(f"{n}._extra_state", state([1.0, 1.0, 1.0], [[0.0] * 3] * 4)),
    "dead": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([9.0, 100.0, 1.0], [[0.0, 0.0, 0.0]] + [[0.0, 1.0, 0.0]] * 3)
    ),
    "poisoned": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([9.0, 100.0, 1.0], [[0.0] * 3, [1.0, 1.0, 0.0], [float("inf"), 1.0, 0.0]])
    ),
    "unusable": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([float("inf"), 100.0, 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 3)
    ),
    "unusable ": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([1e-40, 100.0, 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 3)
    ),
    "contradictory": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([4480.0, 100.0, 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 3)
    ),
    "not finite": lambda s, n: s[f"{n}.weight"].__setitem__((3, 3), float("nan")),
    "stale": lambda s, n: s[f"{n}.weight"].__setitem__((3, 3), 50.0),
    "short history": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([9.0, 100.0, 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 3, configured=1024)
    ),
    "spike": lambda s, n: s.__setitem__(
        f"{n}._extra_state", state([9.0, 100.0, 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 6 + [[40.0, 1.0, 0.0]])
    ),
}


def state(scale: list[float], history: list[list[float]], configured: int | None = None) -> torch.Tensor:
    payload = te.delayed(scale, history)
    if configured:
        payload["recipe"].amax_history_len = configured
    return te.as_u8(te.pickled(payload))


@pytest.mark.parametrize("trouble", SICK)
def test_inspect_finds_each_kind_of_trouble_and_advises(tmp_path, trouble) -> None:
    weights = llama.weights()
    full = {**weights, **llama.states(weights)}
    name = "model.layers.1.mlp.down_proj"
    SICK[trouble](full, name)
    source = llama.write(tmp_path / "sick", full)
    found = json.loads(run("inspect", source, "--json").stdout)["findings"]
    trouble = trouble.strip()
    assert {finding["kind"] for finding in found} == {trouble}
    assert {finding["linear"] for finding in found} == {name}
    assert all(finding["advice"] for finding in found)
    assert trouble in run("inspect", source).stdout


def test_inspect_of_a_plain_folder_says_nothing_was_learned(tmp_path) -> None:
    result = run("inspect", llama.hf_plain(tmp_path / "plain"))
    assert result.exit_code == 0
    assert "hf_plain" in result.stdout
    assert "without learned scales" in result.stdout


def test_a_recipe_without_learned_scales_is_said_in_words(tmp_path) -> None:
    weights = llama.weights()
    empty = {key: te.as_u8(te.pickled({"recipe": te.Float8CurrentScaling()})) for key in llama.states(weights)}
    source = llama.write(tmp_path / "current", {**weights, **empty})
    assert "current scaling" in run("inspect", source).stdout
    refused = run("convert", source)
    assert refused.exit_code == 4
    assert "current scaling" in refused.stderr
    assert run("convert", source, "--scales", "dynamic").exit_code == 0


def test_verify_exits_with_3_and_names_the_fault(source, tmp_path) -> None:
    run("convert", source)
    out = tmp_path / "te-fp8"
    assert run("verify", out).exit_code == 0
    key = "model.layers.0.mlp.up_proj.weight_scale"
    edit_tensors(out / "model.safetensors", lambda s: s.pop(key))
    result = run("verify", out)
    assert result.exit_code == 3
    assert "an FP8 weight without weight_scale" in result.stdout
    assert not json.loads(run("verify", out, "--json").stdout)["passed"]


def test_parity_exits_with_3_and_names_the_layer(source, tmp_path) -> None:
    run("convert", source)
    out = tmp_path / "te-fp8"
    assert run("parity", source, out, "--depth", "weights").exit_code == 0
    name = "model.layers.1.self_attn.v_proj"
    edit_tensors(
        out / "model.safetensors", lambda s: s.__setitem__(f"{name}.input_scale", s[f"{name}.input_scale"] / 2)
    )
    result = run("parity", source, out)
    assert result.exit_code == 3
    assert name in result.stderr


def test_an_exported_folder_is_not_a_source_yet_says_so(source, tmp_path) -> None:
    run("convert", source)
    result = run("convert", tmp_path / "te-fp8")
    assert result.exit_code == 4
    assert "already quantised" in result.stderr


MISTAKES = {
    "no such path": (("convert", "nowhere"), 4),
    "not a checkpoint": (("convert", "EMPTY"), 4),
    "unknown target": (("convert", "CKPT", "--to", "gguf"), 2),
    "unknown source": (("convert", "CKPT", "--from", "keras"), 2),
    "unknown policy": (("convert", "CKPT", "--scales", "average"), 2),
    "unknown granularity": (("convert", "CKPT", "--weights", "block"), 2),
    "pattern without match": (("convert", "CKPT", "--keep", "nothing*"), 2),
    "bad shard size": (("convert", "CKPT", "--shard-size", "big"), 2),
    "shard size of zero": (("convert", "CKPT", "--shard-size", "0GB"), 2),
    "logits without data": (("convert", "CKPT", "--parity", "logits"), 2),
    "absent data": (("convert", "CKPT", "--parity", "logits", "--data", "nowhere.txt"), 2),
    "verify of nothing": (("verify", "nowhere"), 2),
    "verify of a checkpoint": (("verify", "CKPT"), 3),
    "parity with a checkpoint": (("parity", "CKPT", "CKPT"), 4),
    "freeze without destination": (("freeze", "CKPT"), 2),
    "freeze with unknown policy": (("freeze", "CKPT", "-o", "x.json", "--policy", "median"), 2),
    "freeze where nothing was learned": (("freeze", "PLAIN", "-o", "x.json"), 4),
    "destination is a file": (("convert", "CKPT", "-o", "plain/config.json"), 6),
    "checkpoint inside the destination": (("convert", "CKPT", "-o", "."), 2),
    "freeze onto the checkpoint": (("freeze", "CKPT", "-o", "CKPT/model.safetensors"), 6),
    "freeze onto a config": (("freeze", "CKPT", "-o", "CKPT/config.json"), 6),
    "freeze into a missing folder": (("freeze", "CKPT", "-o", "no/where.json"), 6),
    "freeze onto a folder": (("freeze", "CKPT", "-o", "."), 6),
    "freeze keeping nothing": (("freeze", "CKPT", "-o", "x.json", "--keep", "zzz*"), 2),
    "inspect of a device": (("inspect", "/dev/null"), 4),
    "absent config folder": (("convert", "CKPT", "--hf-config", "nowhere"), 2),
    "endless shards": (("convert", "CKPT", "--shard-size", "infGB"), 2),
    "impossible device": (("parity", "CKPT", "EXPORT", "--device", "abacus"), 2),
    "destination inside the source": (("convert", "CKPT", "-o", "CKPT/out"), 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message_and_its_exit_code(source, tmp_path, monkeypatch, mistake) -> None:
    llama.hf_plain(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    words, exit_code = MISTAKES[mistake]
    if "EXPORT" in words:
        run("convert", source, "-o", tmp_path / "export")
    places = {"EXPORT": tmp_path / "export", "CKPT": source, "EMPTY": tmp_path / "empty", "PLAIN": tmp_path / "plain"}
    before = sorted(p.as_posix() for p in tmp_path.rglob("*"))
    result = run(
        *(str(word).replace("CKPT", str(source)) if "CKPT" in word else places.get(word, word) for word in words)
    )
    assert result.exit_code == exit_code, result.output
    assert result.stderr
    assert "Traceback" not in result.output
    assert sorted(p.as_posix() for p in tmp_path.rglob("*")) == before


DATA = {
    "text": lambda f: f.with_suffix(".txt"),
    "jsonl": lambda f: f.with_suffix(".jsonl"),
    "npy": lambda f: f.with_suffix(".npy"),
    "safetensors": lambda f: f.with_suffix(".safetensors"),
}


def write_data(kind: str, base: Path) -> Path:
    file = DATA[kind](base)
    text = "def f(x):\n    return x + 1\n" * 60
    ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    if kind == "text":
        file.write_text(text)
    elif kind == "jsonl":
        file.write_text("\n".join(json.dumps({"text": line}) for line in text.splitlines()))
    elif kind == "npy":
        np.save(file, ids.numpy().astype("int32"))
    else:
        save_file({"input_ids": ids[:256].reshape(4, 64).int()}, file)
    return file


@pytest.mark.client
@pytest.mark.parametrize("kind", DATA)
def test_logits_are_judged_on_the_users_own_data(source, tmp_path, kind) -> None:
    data = write_data(kind, tmp_path / "data")
    run("convert", source)
    result = run("parity", source, tmp_path / "te-fp8", "--data", data, "--samples", 2, "--seq-len", 32, "--json")
    assert result.exit_code == 0, result.output
    logits = json.loads(result.stdout)["logits"]
    assert logits["tokens"] == 64
    assert logits["kl_mean"] <= 1.25 * logits["noise_floor_kl"]
    assert set(logits["perplexity"]) == {"training-time FP8", "high precision", "export"}


@pytest.mark.parametrize("content", ["", "x" * 10])
def test_too_little_data_is_a_usage_error(source, tmp_path, content) -> None:
    data = tmp_path / "d.txt"
    data.write_text(content)
    run("convert", source)
    assert run("parity", source, tmp_path / "te-fp8", "--data", data).exit_code == 2


def test_token_ids_beyond_the_vocabulary_are_a_usage_error(source, tmp_path) -> None:
    np.save(tmp_path / "d.npy", np.arange(1000))
    run("convert", source)
    assert run("parity", source, tmp_path / "te-fp8", "--data", tmp_path / "d.npy").exit_code == 2


def test_help_is_quick_because_torch_stays_out() -> None:
    code = "import sys; sys.argv = ['fp8export', '--help']\nfrom fp8export.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "heavy = {'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules)\n"
    code += "assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("inspect", "freeze", "convert", "verify", "parity"):
        assert command in result.stdout


def strict(text: str):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_no_infinity_or_nan(tmp_path) -> None:
    weights = llama.weights()
    full = {**weights, **llama.states(weights)}
    full["model.layers.0.mlp.down_proj.weight"].zero_()
    source = llama.write(tmp_path / "zero", full)
    assert strict(run("convert", source, "--json", "--parity", "linears").stdout)["verify"]["passed"]
    strict((tmp_path / "zero-fp8" / "fp8export.json").read_text())
    strict(run("parity", source, tmp_path / "zero-fp8", "--json").stdout)
    full["model.layers.0.mlp.down_proj._extra_state"] = state(
        [0.0, float("nan"), 1.0], [[0.0] * 3] + [[1.0, 1.0, 0.0]] * 3
    )
    assert strict(run("inspect", llama.write(tmp_path / "sick", full), "--json").stdout)["findings"]


def test_names_with_brackets_are_shown_as_they_are(source, tmp_path) -> None:
    run("convert", source)
    out = tmp_path / "te-fp8"
    edit_tensors(out / "model.safetensors", lambda s: s.update({"z[/b].input_scale": torch.ones(1)}))
    result = run("verify", out)
    assert result.exit_code == 3
    assert "z[/b].input_scale" in result.stdout


def test_freeze_leaves_out_what_is_kept_and_overwrites_only_scale_files(source, tmp_path) -> None:
    file = tmp_path / "scales.json"
    assert run("freeze", source, "-o", file, "--keep", "*.0.self_attn.q_proj").exit_code == 0
    content = json.loads(file.read_text())
    assert "model.layers.0.self_attn.v_proj" not in content["inputs"], "its fused set is kept whole"
    assert len(content["inputs"]) == 11
    assert run("freeze", source, "-o", file).exit_code == 0
    assert len(json.loads(file.read_text())["inputs"]) == 14


def test_a_path_with_spaces_is_quoted_in_the_serve_command(tmp_path) -> None:
    source = llama.te_fp8(tmp_path / "mein modell ü [x]")
    result = run("convert", source)
    assert result.exit_code == 0
    assert f"vllm serve '{source}-fp8'" in result.stdout


BAD_DATA = {
    "floats.npy": lambda f: np.save(f, np.random.rand(500).astype("float32")),
    "objects.npy": lambda f: np.save(f, np.array([{}, 1] * 300, dtype=object), allow_pickle=True),
    "junk.npy": lambda f: f.write_bytes(b"junk"),
    "bytes.jsonl": lambda f: f.write_bytes(b'{"text": "\xff"}\n'),
    "number.jsonl": lambda f: f.write_text('{"text": 5}\n'),
    "list.jsonl": lambda f: f.write_text("[1]\n"),
    "two.safetensors": lambda f: save_file({"a": torch.ones(300).int(), "b": torch.ones(300).int()}, f),
    "cut.safetensors": lambda f: f.write_bytes(b"\x08\x00"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_read_is_an_error_with_a_name(source, tmp_path, name) -> None:
    BAD_DATA[name](tmp_path / name)
    run("convert", source)
    result = run("parity", source, tmp_path / "te-fp8", "--data", tmp_path / name)
    assert result.exit_code in (2, 4), result.output
    assert name in result.stderr
    assert "allow_pickle" not in result.stderr
