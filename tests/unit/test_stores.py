"""Checkpoints on disk: what is read, and what is refused with the human reason."""

import contextlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from builders import llama
from safetensors.torch import save_file

from fp8export.errors import CheckpointError
from fp8export.store import open_store

INDEX = "model.safetensors.index.json"


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor.read() for key, tensor in open_store(folder).tensors.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        assert torch.equal(
            found[key].reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8)
        ), key


def sharded(folder: Path, state: dict[str, torch.Tensor], suffix: str = "safetensors") -> Path:
    """Two shards, dealt out alternately, so that neighbours lie apart."""
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(2):
        name = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        part = {key: value for j, (key, value) in enumerate(state.items()) if j % 2 == i}
        if suffix == "safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(llama.config()))
    return folder


ODD = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "half": torch.randn(3, 5).half(),
    "double": torch.randn(7, dtype=torch.float64),
    "codes": torch.arange(-128, 128).to(torch.int8),
    "fp8": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "deep": torch.randn(2, 3, 4, 5).bfloat16(),
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_every_shape_and_type_comes_back_to_the_byte(tmp_path, suffix) -> None:
    if suffix == "safetensors":
        save_file(ODD, tmp_path / "model.safetensors")
    else:
        torch.save(ODD, tmp_path / "pytorch_model.bin")
    assert_same(read_all(tmp_path), ODD)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_joined_by_their_index(tmp_path, suffix) -> None:
    state = llama.weights()
    assert_same(read_all(sharded(tmp_path, state, suffix)), state)


@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "step.bin"])
@pytest.mark.parametrize("wrap", [None, "model", "state_dict", "module", "model_state_dict"])
def test_a_lone_torch_file_is_read_wherever_the_script_put_the_model(tmp_path, name, wrap) -> None:
    state = llama.weights(layers=1)
    content = {wrap: state, "step": 7, "optimizer": {"state": {0: {"exp_avg": torch.randn(3)}}}} if wrap else state
    torch.save(content, tmp_path / name)
    assert_same({key: t.read() for key, t in open_store(tmp_path / name).tensors.items()}, state)


def test_views_transposes_and_parameters_are_read_by_value(tmp_path) -> None:
    base = torch.randn(40, 30)
    state = {"t": base.t(), "cut": base[5:9, ::2], "row": base[3], "param": torch.nn.Parameter(base[2:4])}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(read_all(tmp_path), {key: value.detach() for key, value in state.items()})
    lazy = open_store(tmp_path).tensors["t"]
    assert torch.equal(lazy.read(10, 13), base.t()[10:13])


def test_rows_are_read_alone(tmp_path) -> None:
    state = {"w": torch.randn(100, 7)}
    save_file(state, tmp_path / "model.safetensors")
    lazy = open_store(tmp_path).tensors["w"]
    assert torch.equal(lazy.read(17, 23), state["w"][17:23])
    ranges = lazy.chunks(target_bytes=300)
    assert [lo for lo, _ in ranges[1:]] == [hi for _, hi in ranges[:-1]]
    assert torch.equal(torch.cat([lazy.read(lo, hi) for lo, hi in ranges]), state["w"])


def test_a_hub_cache_folder_of_links_is_followed(tmp_path) -> None:
    llama.hf_plain(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in os.listdir(tmp_path / "blobs"):
        os.symlink(f"../blobs/{name}", tmp_path / "snapshot" / name)
    assert len(open_store(tmp_path / "snapshot").tensors) == len(llama.weights())


def damaged_index(folder: Path, change) -> Path:
    sharded(folder, llama.weights(layers=1))
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("escape", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "C:x", "", ".."])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, escape) -> None:
    folder = damaged_index(tmp_path, lambda m: m.update({"lm_head.weight": escape}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_store(folder)


def test_an_index_that_names_an_absent_shard_or_tensor_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="shard that is not there"):
        open_store(damaged_index(tmp_path / "a", lambda m: m.update({"lm_head.weight": "model-9.safetensors"})))
    with pytest.raises(CheckpointError, match="tensor that its shard does not hold"):
        open_store(damaged_index(tmp_path / "b", lambda m: m.update({"ghost": "model-00001-of-00002.safetensors"})))


def test_a_tensor_outside_the_index_is_carried_over_and_said(tmp_path) -> None:
    store = open_store(damaged_index(tmp_path, lambda m: m.pop("lm_head.weight")))
    assert "lm_head.weight" in store.tensors
    assert any("lm_head.weight" in note.where for note in store.notes)


def test_two_owners_of_one_tensor_are_refused(tmp_path) -> None:
    folder = sharded(tmp_path, llama.weights(layers=1))
    first, second = sorted(folder.glob("*.safetensors"))
    from builders.damage import edit_tensors, tensors_of

    key = next(iter(tensors_of(first)))
    edit_tensors(second, lambda state: state.update({key: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="two shards"):
        open_store(folder)


def test_a_stray_weight_file_is_not_read(tmp_path) -> None:
    folder = sharded(tmp_path, llama.weights(layers=1))
    save_file({"stray": torch.randn(2)}, folder / "model.safetensors")
    store = open_store(folder)
    assert "stray" not in store.tensors
    assert "model.safetensors" in store.skipped_files


def test_a_git_lfs_pointer_is_called_by_its_name(tmp_path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
        with pytest.raises(CheckpointError, match="Git LFS pointer"):
            open_store(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_cut_anywhere_is_refused(tmp_path, suffix) -> None:
    name = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    file = tmp_path / name
    (save_file if suffix == "safetensors" else torch.save)(llama.weights(layers=1), file)
    whole = file.read_bytes()
    for length in (0, 1, 7, 9, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_store(tmp_path)


def header(file: Path, table: dict | str) -> Path:
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    return file


@pytest.mark.parametrize(
    "table",
    [
        {"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 60]}},
        {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}},
        {"a": {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]}},
        {
            "a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "b": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
        },
        {"a": {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]}},
        {"a": {"dtype": "F32", "shape": [1.6e1], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [16]}},
        {"a": 3},
        '{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, '
        '"a": {"dtype": "I32", "shape": [16], "data_offsets": [0, 64]}}',
        "[" * 100_000,
        "[]",
        "nonsense",
    ],
)
def test_a_lying_safetensors_header_is_refused(tmp_path, table) -> None:
    header(tmp_path / "model.safetensors", table)
    with pytest.raises(CheckpointError):
        open_store(tmp_path)


def test_a_header_length_beyond_reason_is_refused_without_allocating(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header does not fit"):
        open_store(tmp_path)


def test_a_compressed_archive_is_refused(tmp_path) -> None:
    plain = tmp_path / "plain.pt"
    torch.save({"w": torch.zeros(1000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    with pytest.raises(CheckpointError):
        open_store(tmp_path / "m.pt")


def test_a_shard_that_shrinks_after_opening_is_an_error_not_a_crash(tmp_path) -> None:
    folder = llama.hf_plain(tmp_path / "m")
    lazy = open_store(folder).tensors["lm_head.weight"]
    os.truncate(folder / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match="too early"):
        lazy.read()


def test_any_bit_of_an_archives_directory_may_flip(tmp_path) -> None:
    file = tmp_path / "m.pt"
    torch.save(llama.weights(layers=1), file)
    whole = file.read_bytes()
    start = whole.find(b"PK\x01\x02")
    random = torch.Generator().manual_seed(3)
    for _ in range(300):
        place = int(torch.randint(start, len(whole), (1,), generator=random))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(torch.randint(0, 8, (1,), generator=random))
        file.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            open_store(file)


def test_a_file_that_may_not_be_read_is_a_clear_error(tmp_path, monkeypatch) -> None:
    llama.hf_plain(tmp_path / "m")

    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("fp8export.store.safetensors_dir.refuse_pointer", forbidden)
    with pytest.raises(CheckpointError, match=r"Permission denied[\s\S]*model\.safetensors"):
        open_store(tmp_path / "m")
