"""The door: what training leaves comes in, nothing else does, nothing runs."""

import contextlib
import io
import os
import pickle
import resource
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from builders import te
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8export.errors import CheckpointError, UnsafePickleError
from fp8export.store import open_store
from fp8export.store.safe_pickle import Inert, load_extra_state, load_torch_file


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> object:
        return self.call


def nested_torch_payload(marker: Path) -> bytes:
    """A call hidden in the torch stream that a pickled tensor carries."""
    inner = io.BytesIO()
    torch.save({"x": Calls(os.system, f"touch {marker}")}, inner, _use_new_zipfile_serialization=False)
    return pickle.dumps(Calls(torch.storage._load_from_bytes, inner.getvalue()))


ATTACKS = {
    "os.system": lambda marker: pickle.dumps(Calls(os.system, f"touch {marker}")),
    "open": lambda marker: pickle.dumps(Calls(open, str(marker), "w")),
    "eval": lambda marker: pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w')")),
    "numpy attributes": lambda marker: b"cnumpy.__builtins__\neval\n(S'1'\ntR.",
    "dotted name": lambda marker: b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
    "getattr": lambda marker: b"c__builtin__\ngetattr\n(cos\nsystem\nS'x'\ntR.",
    "inst opcode": lambda marker: b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.",
    "unrestricted torch.load": lambda marker: pickle.dumps(Calls(torch.load, str(marker))),
    "nested torch payload": nested_torch_payload,
    "codec": lambda marker: b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("load", [load_extra_state, load_torch_file])
def test_a_payload_that_would_run_code_is_refused_by_name(tmp_path, name, load) -> None:
    marker = tmp_path / "executed"
    with pytest.raises(UnsafePickleError) as caught:
        load(ATTACKS[name](marker), "file::key")
    assert caught.value.exit_code == 7
    assert "file::key" in str(caught.value)
    assert not marker.exists()


def test_a_malicious_torch_file_is_refused_by_the_store(tmp_path) -> None:
    marker = tmp_path / "executed"
    torch.save({"w": torch.zeros(2), "x": Calls(os.system, f"touch {marker}")}, tmp_path / "m.pt")
    with pytest.raises(UnsafePickleError, match="system"):
        open_store(tmp_path / "m.pt")
    assert not marker.exists()


def test_a_recipe_comes_in_as_an_inert_record() -> None:
    payload = load_extra_state(te.pickled(te.delayed([2.0, 4.0, 1.0], [[0.0] * 3] * 3, margin=2)), "k")
    assert type(payload["recipe"]).__name__ == "DelayedScaling"
    assert isinstance(payload["recipe"], Inert)
    assert payload["recipe"].state["margin"] == 2
    assert payload["scale_fwd"].tolist() == [2.0, 4.0, 1.0]


def test_a_memo_index_of_two_billion_allocates_nothing() -> None:
    bomb = b"\x80\x04]" + b"r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load_extra_state(bomb, "k") == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def nested_tuples(depth: int) -> bytes:
    """t = (t, t), again and again: small to write, endless to hash."""
    return b"\x80\x04)" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(depth))


@pytest.mark.parametrize(
    "use",
    [
        lambda t: b"\x80\x04}" + t[2:] + b"K\x01s.",
        lambda t: b"\x80\x04}(" + t[2:] + b"K\x01u.",
        lambda t: b"\x80\x04(" + t[2:] + b"K\x01d.",
        lambda t: b"\x80\x04\x8f(" + t[2:] + b"\x90.",
        lambda t: b"\x80\x04(" + t[2:] + b"\x91.",
        lambda t: b"\x80\x04ccollections\nOrderedDict\n(](" + t[2:] + b"K\x01\x86etR.",
    ],
)
def test_a_key_that_would_take_for_ever_to_hash_is_refused(use) -> None:
    with pytest.raises(CheckpointError):
        load_extra_state(use(nested_tuples(60)), "k")


@pytest.mark.parametrize("state", [b"}\x8c\x01xK\x01s", b"N}\x8c\x0c__defaults__K\x01s\x86"])
@pytest.mark.parametrize("target", [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n", b"]", b"K\x01"])
def test_nothing_that_is_named_can_be_changed(target, state) -> None:
    before = torch._utils._rebuild_tensor_v2.__defaults__
    with pytest.raises(CheckpointError):
        load_extra_state(b"\x80\x04" + target + state + b"b.", "k")
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before


def test_a_tensor_that_reaches_past_its_storage_is_refused_not_filled_with_memory() -> None:
    class Cut:
        def __reduce__(self) -> object:
            storage = torch.ones(1)._typed_storage()
            return torch._utils._rebuild_tensor_v2, (storage, 0, (3,), (1,), False, OrderedDict())

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = pickle.dumps({"scale_fwd": Cut()}, protocol=4)
    with pytest.raises(CheckpointError, match="past its storage"):
        load_extra_state(data, "k")


def test_what_scripts_save_beside_the_model_is_no_attack(tmp_path) -> None:
    import argparse

    import numpy as np

    beside = {"args": argparse.Namespace(lr=1e-3), "loss": np.float64(0.5), "path": Path("x"), "z": torch.zeros(2) * 1j}
    torch.save({"model": {"w": torch.ones(3)}, **beside}, tmp_path / "m.pt")
    assert open_store(tmp_path / "m.pt").tensors["w"].read().tolist() == [1, 1, 1]


def test_shared_and_circular_values_cost_one_visit(tmp_path) -> None:
    wide: list = []
    for _ in range(40):
        wide = [wide] * 50
    wide.append(wide)
    torch.save({"w": torch.ones(3), "extra": wide}, tmp_path / "m.pt")
    assert "extra" in open_store(tmp_path / "m.pt").objects


def test_a_torch_file_pickle_builds_no_tensor() -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.zeros(1000, 1000)}, stream)
    import zipfile

    with zipfile.ZipFile(stream) as archive:
        data = archive.read("archive/data.pkl")
    described = load_torch_file(data, "k")["w"]
    assert described.shape == (1000, 1000)
    assert described.stride == (1000, 1)


REAL = te.pickled(te.delayed([2.0, 4.0, 1.0], [[0.0] * 3] * 8))


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(REAL) - 1), value=st.integers(0, 255), cut=st.integers(0, len(REAL)))
def test_any_damage_is_read_or_refused_never_anything_else(place: int, value: int, cut: int) -> None:
    for data in (REAL[:place] + bytes([value]) + REAL[place + 1 :], REAL[:cut]):
        with contextlib.suppress(CheckpointError):
            load_extra_state(data, "k")
