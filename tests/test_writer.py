"""Streaming, atomic, resumable, deterministic: what a crash leaves and what the next run makes of it."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from builders import llama
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fp8export import convert, verify_folder
from fp8export.errors import OutputError
from fp8export.layout import Entry, Job, Layout, OutFile
from fp8export.model import DTYPES
from fp8export.writer import write

SHARD = 60_000


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama.te_fp8(tmp_path / "te")


def stop_halfway(source: Path, out: Path) -> None:
    def bomb(done: int, total: int, label: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, shard_size=SHARD, on_progress=bomb)


def run_cli(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fp8export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def plain_layout(tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Layout:
    names = {dtype: key for key, dtype in DTYPES.items()}

    def job(key: str) -> Job:
        value = tensors[key]

        def run(sink) -> list:
            rows = value.reshape(1) if value.ndim == 0 else value
            for i in range(len(rows)):
                sink(key, i, rows[i : i + 1])
            return []

        return Job((Entry(key, tuple(value.shape), names[value.dtype]),), run)

    return Layout((OutFile(name, tuple(job(key) for key in tensors)),), {}, lambda _: {}, "f", "r")


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text("abcdefgé.世", min_size=1, max_size=12),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from(
                [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.float8_e4m3fn]
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_bytes_equal_those_of_safetensors_own_writer(tmp_path_factory, shapes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    tensors = {key: torch.randn(shape).to(dtype) for key, (shape, dtype) in shapes.items()}
    write(plain_layout(tensors), folder / "ours")
    save_file(tensors, folder / "theirs.safetensors", metadata={"format": "pt"})
    assert (folder / "ours" / "model.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()


def test_the_same_command_gives_the_same_bytes_wherever_the_checkpoint_lies(source, tmp_path) -> None:
    convert(source, tmp_path / "a", shard_size=SHARD)
    moved = Path(shutil.copytree(source, tmp_path / "elsewhere" / "other name"))
    convert(moved, tmp_path / "b", shard_size=SHARD)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_shards_stay_below_their_limit_and_keep_a_linear_with_its_scales(source, tmp_path) -> None:
    convert(source, tmp_path / "out", shard_size=SHARD)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.stat().st_size <= SHARD + 4096
        with safe_open(file, "pt") as handle:
            keys = set(handle.keys())
        for key in keys:
            if key.endswith("weight_scale"):
                assert {key.replace("weight_scale", part) for part in ("weight", "input_scale")} <= keys


def test_every_other_file_of_the_folder_is_copied_byte_for_byte(source, tmp_path) -> None:
    extra = {
        "tokenizer.json": b'{"a": 1}',
        "generation_config.json": b"{}",
        "modeling_custom.py": b"# code\n",
        "chat templates/default.jinja": "{{ ü }}".encode(),
        "README.md": b"# mine\n",
    }
    for name, content in extra.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "optimizer.pt").write_bytes(b"PK")
    convert(source, tmp_path / "out")
    for name, content in extra.items():
        copied = "README.source.md" if name == "README.md" else name
        assert (tmp_path / "out" / copied).read_bytes() == content
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    assert "optimizer.pt" in json.loads((tmp_path / "out" / "fp8export.json").read_text())["not_exported"]


def test_killed_at_ten_random_moments_the_same_command_finishes_with_the_same_bytes(tmp_path) -> None:
    state = llama.weights(layers=12)
    source = llama.write(tmp_path / "te", {**state, **llama.states(state)}, llama.config(12))
    arguments = ("convert", source, "-o", tmp_path / "out", "--shard-size", "20KB", "--parity", "off")
    began = time.monotonic()
    assert run_cli(*arguments).returncode == 0
    duration = time.monotonic() - began
    expected = hashes(tmp_path / "out")
    assert len(expected) > 20
    shutil.rmtree(tmp_path / "out")
    moments = random.Random(7)
    stopped_midway = 0
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-m", "fp8export", *map(str, arguments)], stdout=subprocess.DEVNULL)
        # importing takes most of the time: aim at the rest
        time.sleep(duration * moments.uniform(0.4, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        stopped_midway += (tmp_path / "out.fp8export-partial").exists()
        if not (tmp_path / "out").exists():
            assert (
                not (tmp_path / "out.fp8export-partial" / "config.json").exists()
                or verify_folder(tmp_path / "out.fp8export-partial").passed
            )
    assert run_cli(*arguments).returncode == 0
    assert hashes(tmp_path / "out") == expected
    assert not (tmp_path / "out.fp8export-partial").exists()


@pytest.mark.parametrize("stop", range(0, 40, 4))
def test_stopped_inside_any_job_the_finished_files_are_kept_and_the_rest_redone(source, tmp_path, stop) -> None:
    convert(source, tmp_path / "whole", shard_size=SHARD)
    expected = hashes(tmp_path / "whole")

    class Stop(BaseException):
        pass

    calls = 0

    def bomb(done: int, total: int, label: str) -> None:
        nonlocal calls
        calls += 1
        if calls > stop:
            raise Stop

    try:
        convert(source, tmp_path / "out", shard_size=SHARD, on_progress=bomb)
    except Stop:
        assert not (tmp_path / "out").exists()
        kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out.fp8export-partial").glob("*.safetensors")}
        convert(source, tmp_path / "out", shard_size=SHARD)
        again = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
        assert kept.items() <= again.items()
    assert hashes(tmp_path / "out") == expected


def test_leftovers_of_another_command_are_not_mixed_in(source, tmp_path) -> None:
    stop_halfway(source, tmp_path / "out")
    convert(source, tmp_path / "out", shard_size=SHARD, weights="tensor")
    convert(source, tmp_path / "clean", shard_size=SHARD, weights="tensor")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "clean")


def test_a_changed_source_does_not_resume_into_old_files(source, tmp_path) -> None:
    stop_halfway(source, tmp_path / "out")
    state = llama.weights(seed=5)
    llama.write(source, {**state, **llama.states(state)})
    convert(source, tmp_path / "out", shard_size=SHARD)
    convert(source, tmp_path / "clean", shard_size=SHARD)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "clean")


def test_run_again_after_success_changes_nothing_but_another_destination_is_refused(source, tmp_path) -> None:
    convert(source, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert convert(source, tmp_path / "out").already_there
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with pytest.raises(OutputError, match="not this command's result"):
        convert(source, tmp_path / "out", weights="tensor")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(OutputError):
        convert(source, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "irreplaceable"


def test_a_source_touched_after_the_export_is_not_taken_as_done(source, tmp_path) -> None:
    convert(source, tmp_path / "out")
    later = time.time() + 60
    os.utime(source / "model.safetensors", (later, later))
    with pytest.raises(OutputError):
        convert(source, tmp_path / "out")


def test_two_runs_into_one_folder_do_not_tear_each_other(source, tmp_path) -> None:
    refused = []

    def second_run(done: int, total: int, label: str) -> None:
        if not refused:
            with pytest.raises(OutputError, match="another run"):
                convert(source, tmp_path / "out")
            refused.append(True)

    convert(source, tmp_path / "out", on_progress=second_run)
    assert refused
    assert verify_folder(tmp_path / "out").passed


def test_a_folder_that_is_not_ours_is_never_touched(source, tmp_path) -> None:
    for name in ("out.partial", "out.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text("thesis")
    convert(source, tmp_path / "out")
    assert all((tmp_path / name / "precious.txt").exists() for name in ("out.partial", "out.tmp"))


def test_a_working_folder_that_is_a_link_is_refused(source, tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious.txt").write_text("thesis")
    os.symlink(tmp_path / "elsewhere", tmp_path / "out.fp8export-partial")
    with pytest.raises(OutputError, match="is a link"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "elsewhere" / "precious.txt").exists()


def test_the_lock_holds_until_the_folder_has_its_name(source, tmp_path, monkeypatch) -> None:
    """A second run that comes while the first one publishes must neither write into it nor destroy it."""
    from fp8export import writer

    rename, seen = os.rename, []

    def slow_rename(old, new) -> None:
        with pytest.raises(OutputError, match="another run"):
            convert(source, tmp_path / "out")
        seen.append(True)
        rename(old, new)

    monkeypatch.setattr(writer.os, "rename", slow_rename)
    convert(source, tmp_path / "out")
    assert seen
    assert verify_folder(tmp_path / "out").passed


def test_an_edit_that_no_sample_saw_is_seen_by_its_date(source, tmp_path) -> None:
    stop_halfway(source, tmp_path / "out")
    kept = list((tmp_path / "out.fp8export-partial").glob("*.safetensors"))
    assert kept
    dates = {p.name: p.stat().st_mtime_ns for p in kept}
    os.utime(source / "model.safetensors", (1e9, 1e9))
    convert(source, tmp_path / "out", shard_size=SHARD)
    assert all((tmp_path / "out" / name).stat().st_mtime_ns != date for name, date in dates.items())


def test_another_tokenizer_is_another_export(source, tmp_path) -> None:
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "out")
    (source / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(OutputError):
        convert(source, tmp_path / "out")


def test_what_cannot_or_must_not_be_copied_is_listed(source, tmp_path) -> None:
    (source / "hf_quant_config.json").write_text("{}")
    (source / "trainer.pkl").write_bytes(b"x")
    os.symlink("nowhere", source / "broken.bin")
    os.mkfifo(source / "pipe.bin")
    for name in ("README.md", "README.source.md"):
        (source / name).write_text(name)
    convert(source, tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "fp8export.json").read_text())["not_exported"]
    assert {"hf_quant_config.json", "trainer.pkl", "broken.bin", "pipe.bin"} <= set(listed)
    assert (tmp_path / "out" / "README.source.md").read_text() == "README.source.md"
    assert (tmp_path / "out" / "README.source-2.md").read_text() == "README.md"


def test_odd_names_and_characters_survive(source, tmp_path) -> None:
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "odd": "\ud800 ü"}))
    (source / os.fsdecode(b"\xff.txt")).write_text("x")
    convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["odd"] == "\ud800 ü"


def test_a_link_gives_the_export_its_own_name(source, tmp_path) -> None:
    os.symlink(source, tmp_path / "link")
    assert convert(tmp_path / "link").out == tmp_path / "link-fp8"


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_when_the_system_refuses_a_write_nothing_is_published(source, tmp_path) -> None:
    result = run_cli("convert", source, "-o", tmp_path / "out", preexec_fn=limit_files)
    assert result.returncode == 6, result.stderr
    assert "what to do: free some space" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    assert run_cli("convert", source, "-o", tmp_path / "out").returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real file system of 128 KB, where the system lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("believes_in_space", [True, False])
def test_a_full_disk_is_a_clear_error_and_nothing_is_published(
    source, small_disk, monkeypatch, believes_in_space
) -> None:
    if believes_in_space:  # space that vanishes while we write
        monkeypatch.setattr("fp8export.writer._check_space", lambda *_: None)
    with pytest.raises(OutputError) as caught:
        convert(source, small_disk / "out")
    assert caught.value.exit_code == 6
    assert not (small_disk / "out").exists()
    assert not list((small_disk / "out.fp8export-partial").glob("*.safetensors"))


def test_a_destination_that_cannot_be_made_is_a_clear_error(source, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        convert(source, tmp_path / "file" / "out")
