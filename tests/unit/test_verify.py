"""The gate: every kind of damage to a good folder is found and named, no good folder is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import llama
from builders.damage import edit_json, edit_tensors, tensors_of
from safetensors.torch import save_file

from fp8export import convert, verify_folder

Q = "model.layers.0.self_attn.q_proj"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A sharded export."""
    base = tmp_path_factory.mktemp("verify")
    convert(llama.te_fp8(base / "te"), base / "out", shard_size=60_000)
    assert len(list((base / "out").glob("*.safetensors"))) > 2
    return base / "out"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def owner(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


def tensor(key: str, change: Callable) -> Callable[[Path], None]:
    """Damage one tensor in its shard, leave the index alone."""

    def damage(folder: Path) -> None:
        edit_tensors(owner(folder, key), lambda state: state.__setitem__(key, change(state[key])))

    return damage


def drop(key: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(owner(folder, key), lambda state: state.pop(key))


def index(change: Callable) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda content: change(content["weight_map"]))


def config(change: Callable) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda content: change(content["quantization_config"]))


def weights_args(**values) -> Callable[[Path], None]:
    return config(lambda q: q["config_groups"]["group_0"]["weights"].update(values))


def input_args(**values) -> Callable[[Path], None]:
    return config(lambda q: q["config_groups"]["group_0"]["input_activations"].update(values))


def nan_code(codes: torch.Tensor) -> torch.Tensor:
    raw = codes.clone().view(torch.uint8)
    raw[3, 4] = 0xFF
    return raw.view(torch.float8_e4m3fn)


def two_owners(folder: Path) -> None:
    key = f"{Q}.weight"
    value = tensors_of(owner(folder, key))[key]
    first = min(folder.glob("*.safetensors"))
    edit_tensors(first, lambda state: state.__setitem__(key, value))


def unlisted(folder: Path) -> None:
    edit_tensors(sorted(folder.glob("*.safetensors"))[0], lambda state: state.__setitem__("extra.bias", torch.ones(3)))


def add(key: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = owner(folder, f"{Q}.weight")
        edit_tensors(file, lambda state: state.__setitem__(key, torch.ones(3)))
        index(lambda m: m.__setitem__(key, file.name))(folder)

    return damage


def header_of(folder: Path, old: str, new: object) -> None:
    """Rewrite the first match in a shard's header, keeping its length by trimming spaces."""
    file = owner(folder, f"{Q}.weight")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].decode()
    quoted = json.dumps(old) if isinstance(new, list) else old
    changed = text.replace(quoted, json.dumps(new) if isinstance(new, list) else str(new), 1).encode()
    assert changed != text.encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 1)


def pointer(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )


def bf16_instead(folder: Path) -> None:
    tensor(f"{Q}.weight", lambda w: w.float().bfloat16())(folder)


def stray(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "stray.safetensors")


def whole_file_beside_index(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")


def scale_as(dtype: torch.dtype) -> Callable[[Path], None]:
    return tensor(f"{Q}.weight_scale", lambda s: s.to(dtype))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "weight scale missing, index intact": (drop(f"{Q}.weight_scale"), "index"),
    "weight scale missing everywhere": (
        lambda f: (drop(f"{Q}.weight_scale")(f), index(lambda m: m.pop(f"{Q}.weight_scale"))(f)),
        "pair",
    ),
    "input scale missing everywhere": (
        lambda f: (drop(f"{Q}.input_scale")(f), index(lambda m: m.pop(f"{Q}.input_scale"))(f)),
        "pair",
    ),
    "scale without its weight": (lambda f: (drop(f"{Q}.weight")(f), index(lambda m: m.pop(f"{Q}.weight"))(f)), "pair"),
    "weight turned back to bf16": (bf16_instead, "pair"),
    "weight as uint8 bit view": (tensor(f"{Q}.weight", lambda w: w.view(torch.uint8)), "pair"),
    "weight as E5M2": (tensor(f"{Q}.weight", lambda w: w.float().to(torch.float8_e5m2)), "pair"),
    "norm stored in FP8": (tensor("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)), "pair"),
    "index names an absent tensor": (index(lambda m: m.update(ghost=next(iter(m.values())))), "index"),
    "index names an absent shard": (index(lambda m: m.update(ghost="model-9.safetensors")), "index"),
    "index names the wrong shard": (index(lambda m: m.update({f"{Q}.weight": min(m.values())})), "index"),
    "index leaves the folder": (index(lambda m: m.update({f"{Q}.weight": "../x.safetensors"})), "path"),
    "index is absolute": (index(lambda m: m.update({f"{Q}.weight": "/tmp/x.safetensors"})), "path"),
    "index is not JSON": (lambda f: (f / INDEX).write_text("{"), "index"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "index"),
    "tensor not in the index": (unlisted, "index"),
    "two owners": (two_owners, "index"),
    "NaN code": (tensor(f"{Q}.weight", nan_code), "codes"),
    "scale of zero": (tensor(f"{Q}.input_scale", torch.zeros_like), "scale"),
    "negative scale": (tensor(f"{Q}.weight_scale", torch.neg), "scale"),
    "one NaN among the channel scales": (
        tensor(f"{Q}.weight_scale", lambda s: s.index_fill(0, torch.tensor([3]), float("nan"))),
        "scale",
    ),
    "infinite scale": (tensor(f"{Q}.input_scale", lambda s: s * float("inf")), "scale"),
    "scale in BF16": (scale_as(torch.bfloat16), "scale"),
    "scale in FP64": (scale_as(torch.float64), "scale"),
    "channel scale [N] for [N, 1]": (tensor(f"{Q}.weight_scale", lambda s: s.reshape(-1)), "scale"),
    "channel scale [1, N]": (tensor(f"{Q}.weight_scale", lambda s: s.t()), "scale"),
    "input scale [] for [1]": (tensor(f"{Q}.input_scale", lambda s: s.reshape(())), "scale"),
    "input scales differ in a fused set": (tensor(f"{Q}.input_scale", lambda s: s * 2), "fused"),
    "config says per tensor": (weights_args(strategy="tensor"), "scale"),
    "config says dynamic inputs": (input_args(strategy="token", dynamic=True), "config"),
    "config says int": (weights_args(type="int"), "config"),
    "config without type": (config(lambda q: q["config_groups"]["group_0"]["weights"].pop("type")), "config"),
    "config of 4 bits": (weights_args(num_bits=4), "config"),
    "config without status": (config(lambda q: q.pop("quantization_status")), "config"),
    "config without format": (config(lambda q: q.pop("format")), "config"),
    "config of another method": (config(lambda q: q.update(quant_method="awq")), "config"),
    "config without quantization": (
        lambda f: edit_json(f / "config.json", lambda c: c.pop("quantization_config")),
        "config",
    ),
    "config missing": (lambda f: (f / "config.json").unlink(), "config"),
    "pattern that matches nothing": (config(lambda q: q["ignore"].append("model.layers.7.mlp.gate")), "exclude"),
    "regular expression that matches nothing": (config(lambda q: q["ignore"].append("re:layers.*")), "exclude"),
    "pattern over a quantised layer": (config(lambda q: q["ignore"].append(Q)), "exclude"),
    "lm_head not excluded": (config(lambda q: q["ignore"].remove("lm_head")), "exclude"),
    "config is an empty object": (lambda f: (f / "config.json").write_text("{}"), "config"),
    "config promises KV scales": (config(lambda q: q.update(kv_cache_scheme={"num_bits": 8})), "config"),
    "config of another group format": (
        config(lambda q: q["config_groups"]["group_0"].update(format="pack-quantized")),
        "config",
    ),
    "config of group scales": (weights_args(group_size=128), "config"),
    "config of a sparse model": (config(lambda q: q.update(sparsity_config={"format": "sparse"})), "config"),
    "config with a strategy that is a list": (weights_args(strategy=["channel"]), "config"),
    "broken regular expression": (config(lambda q: q["ignore"].append("re:(")), "config"),
    "config promises more layers": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(num_hidden_layers=9)),
        "complete",
    ),
    "no embedding": (
        lambda f: (drop("model.embed_tokens.weight")(f), index(lambda m: m.pop("model.embed_tokens.weight"))(f)),
        "complete",
    ),
    "half a fused set gone": (
        lambda f: [
            (drop(f"{Q}.{p}")(f), index(lambda m, p=p: m.pop(f"{Q}.{p}"))(f))
            for p in ("weight", "weight_scale", "input_scale")
        ],
        "complete",
    ),
    "NaN in a norm": (tensor("model.norm.weight", lambda w: w * float("nan")), "codes"),
    "zero point of another format": (add("model.layers.0.self_attn.q_proj.weight_zero_point"), "pair"),
    "KV scale without scheme": (add("model.layers.0.self_attn.k_scale"), "pair"),
    "training state left in": (add("model.layers.0.self_attn.q_proj._extra_state"), "pair"),
    "bias of the wrong length": (add(f"{Q}.bias"), "pair"),
    "header of the wrong types": (lambda f: header_of(f, "F32", ["F32"]), "shard"),
    "header of absurd sizes": (lambda f: header_of(f, "[1]", "[" + "9" * 300 + ",0]"), "shard"),
    "truncated shard": (truncate, "shard"),
    "LFS pointer": (pointer, "shard"),
    "stray weight file": (stray, "stray"),
    "model.safetensors beside an index": (whole_file_beside_index, "index"),
    "shard missing": (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "index"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(folder, name) -> None:
    damage, rule = DAMAGE[name]
    damage(folder)
    report = verify_folder(folder)
    assert not report.passed
    assert rule in {fault.rule for fault in report.faults}, report.faults
    assert all(fault.where for fault in report.faults)


def test_a_good_export_passes_and_its_faults_are_an_empty_list(good) -> None:
    report = verify_folder(good)
    assert report.faults == ()
    assert report.fp8_linears == 14


def test_one_lonely_member_of_a_fused_set_is_found(folder) -> None:
    for part in ("weight_scale", "input_scale"):
        drop(f"{Q}.{part}")(folder)
        index(lambda m, part=part: m.pop(f"{Q}.{part}"))(folder)
    bf16_instead(folder)
    config(lambda q: q["ignore"].append(Q))(folder)
    assert {fault.rule for fault in verify_folder(folder).faults} == {"fused"}


def test_headers_only_skips_the_codes(folder) -> None:
    DAMAGE["NaN code"][0](folder)
    report = verify_folder(folder, codes=False)
    assert report.passed
    assert not report.codes_read


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "tensor"},
        {"weights": "channel"},
        {"scales": "dynamic"},
        {"scales": "history-max"},
        {"scales": "most-recent"},
        {"keep": ("model.layers.0.*",)},
        {"keep": ("*.q_proj", "*.down_proj"), "weights": "tensor"},
        {"shard_size": 30_000},
        {"shard_size": 1},
    ],
)
def test_no_good_export_is_refused(tmp_path, options) -> None:
    convert(llama.te_fp8(tmp_path / "te"), tmp_path / "out", **options)
    assert verify_folder(tmp_path / "out").faults == ()


def test_a_tied_model_is_not_refused(tmp_path) -> None:
    state = llama.weights()
    del state["lm_head.weight"]
    source = llama.write(tmp_path / "te", {**state, **llama.states(state)}, llama.config(tie_word_embeddings=True))
    convert(source, tmp_path / "out")
    assert verify_folder(tmp_path / "out").faults == ()
