"""Transformer Engine's states: every container, every update rule, and what is said when nothing was learned."""

import io
import math
from typing import Any

import pytest
import torch
from builders import llama, te

from fp8export import inspect
from fp8export.calibrate import freeze
from fp8export.calibrate.freeze import settle, updated
from fp8export.errors import CheckpointError
from fp8export.model import Scale
from fp8export.sources.te_fp8 import DelayedState, _slot, decode

FULL = {
    "scale_fwd": torch.tensor([128.0, 64.0, 1.0]),
    "scale_inv_fwd": torch.tensor([1 / 128, 1 / 64, 1.0]),
    "amax_history_fwd": torch.tensor([[0.0, 0.0, 0.0], [3.5, 7.0, 0.0], [2.0, 7.0, 0.0], [1.0, 7.0, 0.0]]),
    "extra_fp8_variables": {"fp8_max_fwd": 448.0},
}


def u8(data: bytes) -> Any:
    from fp8export.model import LazyTensor

    tensor = te.as_u8(data) if data else torch.empty(0, dtype=torch.uint8)
    return LazyTensor(tuple(tensor.shape), torch.uint8, "file::key", lambda lo, hi: tensor[lo:hi])


CONTAINERS = {
    "bytes of a zip (BytesIO, 0.12 to 1.13)": te.as_zip(FULL).getvalue(),
    "uint8 tensor of a zip": u8(te.as_zip(FULL).getvalue()),
    "uint8 tensor of a pickle (0.6 to 0.11, 1.14 and later)": u8(te.pickled(FULL)),
    "bytes of a pickle": te.pickled(FULL),
    "dict (0.3 to 0.5)": FULL,
    "list of ten (0.1 and 0.2)": [
        FULL["scale_fwd"][:2],
        FULL["amax_history_fwd"][:, :2],
        torch.ones(1),
        torch.zeros(4, 1),
        {},
        False,
        0,
        0,
        0,
        0,
    ],
    "list of one": [u8(te.pickled(FULL))],
}
EMPTY = {
    "None": None,
    "empty bytes": b"",
    "empty uint8 tensor": u8(b""),
    "pickled None": te.pickled(None),
    "pickled empty dict": te.pickled({}),
    "list of None": [None],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_scales(name) -> None:
    state = decode(CONTAINERS[name], "k")
    assert isinstance(state, DelayedState)
    for slot, value in ((0, 1 / 128), (1, 1 / 64)):
        evidence = _slot(state, slot, "k")
        scale, _ = settle(evidence, "learned")
        assert isinstance(scale, Scale)
        assert scale.value == value
        assert scale.multiplier == 1 / value


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_container_is_no_state_and_says_so(name) -> None:
    reason = decode(EMPTY[name], "k")
    assert isinstance(reason, str)
    assert "never ran" in reason


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (te.Float8CurrentScaling(), "current scaling"),
        (te.MXFP8BlockScaling(), "MXFP8"),
        (te.Float8BlockScaling(), "block scaling"),
    ],
)
def test_a_recipe_that_learns_no_scales_is_said_in_words(recipe, words) -> None:
    reason = decode(te.pickled({"recipe": recipe, "extra_fp8_variables": {}}), "k")
    assert isinstance(reason, str)
    assert words in reason


@pytest.mark.parametrize(
    "payload",
    [
        {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 2)},
        {"scale_fwd": torch.ones(3)},
        {"scale_fwd": torch.ones(3, dtype=torch.float64), "amax_history_fwd": torch.zeros(4, 3, dtype=torch.float64)},
        {"scale_fwd": torch.ones(3, 1), "amax_history_fwd": torch.zeros(4, 3)},
        {"scale_fwd": [1.0, 1.0, 1.0], "amax_history_fwd": torch.zeros(4, 3)},
        {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(0, 3)},
        [1, 2, 3],
        "text",
    ],
)
def test_a_state_of_the_wrong_shape_is_refused(payload) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode(te.pickled(payload), "file::key")
    assert "file::key" in str(caught.value)


def evidence_of(**payload: Any) -> Any:
    base = te.delayed([2.0, 4.0, 1.0], [[0.0] * 3] * 4)
    state = decode(te.pickled({**base, **payload}), "k")
    assert isinstance(state, DelayedState)
    return _slot(state, 0, "k")


def history(*rows: float) -> torch.Tensor:
    return torch.tensor([[row, 1.0, 0.0] for row in rows])


def test_the_history_is_turned_newest_first_and_row_zero_is_pending() -> None:
    evidence = evidence_of(amax_history_fwd=history(9.0, 1.0, 2.0, 3.0))
    assert evidence.amax_history.tolist() == [3.0, 2.0, 1.0]
    assert evidence.pending == 9.0
    assert not evidence.folds_pending


def test_from_1_6_on_the_stored_scale_is_the_truth_whatever_the_history_says() -> None:
    for rows in ((0.0, 1.0, 2.0, 3.0), (9.0, 1.0, 2.0, 3.0), (0.0, math.inf, 2.0, 3.0), (0.0, 0.0, 0.0, 0.0)):
        scale, _ = settle(evidence_of(amax_history_fwd=history(*rows)), "learned")
        assert isinstance(scale, Scale)
        assert scale.multiplier == 2.0


OLD = {"global_fp8_buffer": {}, "global_fp8_state": {}}


def old(rows: tuple[float, ...], *, update: bool = True, buffer: Any = None, scale: float = 2.0, **extra: Any) -> Any:
    payload = te.delayed([scale, 4.0, 1.0], [[0.0] * 3] * 4, recipe=False)
    payload |= {**OLD, "global_fp8_buffer": buffer or {}, "amax_history_fwd": history(*rows)}
    payload["extra_fp8_variables"] |= {"update_amax_and_scale_fwd": update, **extra}
    state = decode(te.as_zip(payload).getvalue(), "k")
    assert isinstance(state, DelayedState)
    return _slot(state, 0, "k")


def test_up_to_1_5_the_pending_update_is_applied_first() -> None:
    scale, texts = settle(old((5.0, 1.0, 2.0, 3.0), scale=3.0), "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == float(torch.tensor(448.0) / 5.0)
    assert "pending amax was folded in" in texts[0]
    scale, _ = settle(old((1.5, 1.0, 7.0, 3.0), scale=3.0), "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == 64.0, "the window's maximum decides, row 0 included"


def test_up_to_1_5_nothing_is_pending_after_an_evaluation_forward() -> None:
    scale, _ = settle(old((5.0, 1.0, 2.0, 3.0), update=False, scale=3.0), "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == 3.0


def test_up_to_1_5_the_amax_reduced_over_ranks_wins_over_the_local_one() -> None:
    buffer = {"FWD_AMAX_6": [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([14.0, 1.0, 0.0])]}
    evidence = old((5.0, 1.0, 2.0, 3.0), buffer=buffer, scale=3.0, autocast_id_fwd=6, global_fp8_buffer_pos_fwd=1)
    scale, _ = settle(evidence, "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == 32.0


def test_up_to_0_12_the_scale_is_floored_to_a_power_of_two() -> None:
    payload = te.delayed([32.0, 64.0, 1.0], [[0.0] * 3] * 4, recipe=False) | OLD
    payload["amax_history_fwd"] = history(10.0, 1.0, 2.0, 3.0)
    payload["extra_fp8_variables"]["update_amax_and_scale_fwd"] = True
    state = decode(te.as_zip(payload).getvalue(), "k")
    assert isinstance(state, DelayedState)
    scale, _ = settle(_slot(state, 0, "k"), "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == 32.0, "448 / 10 is 44.8"


def test_amax_seen_while_calibrating_is_converted_once() -> None:
    evidence = evidence_of(scale_fwd=torch.tensor([1.0, 1.0, 1.0]), amax_history_fwd=history(3.5, 0.0, 0.0, 0.0))
    scale, _ = settle(evidence, "learned")
    assert isinstance(scale, Scale)
    assert scale.multiplier == 128.0


@pytest.mark.parametrize(
    ("policy", "margin", "rows", "value"),
    [
        ("history-max", 0, (0.0, 3.5, 2.0, 1.0), 3.5 / 448),
        ("history-max", 1, (0.0, 3.5, 2.0, 1.0), 7.0 / 448),
        ("history-max", 0, (7.0, 3.5, 2.0, 1.0), 7.0 / 448),
        ("history-max", 0, (0.0, 3.5, math.inf, 1.0), 3.5 / 448),
        ("most-recent", 0, (0.0, 3.5, 2.0, 1.75), 1.75 / 448),
        ("most-recent", 0, (0.0, 3.5, 1.75, 0.0), 1.75 / 448),
        ("most-recent", 0, (7.0, 3.5, 1.75, 0.0), 7.0 / 448),
        ("most-recent", 0, (0.0, 1.75, math.nan, 0.0), 1.75 / 448),
    ],
)
def test_history_policies(policy, margin, rows, value) -> None:
    recipe = te.DelayedScaling(margin=margin, amax_compute_algo="max", amax_history_len=4)
    scale, _ = settle(evidence_of(amax_history_fwd=history(*rows), recipe=recipe), policy)
    assert isinstance(scale, Scale)
    assert scale.value == value


@pytest.mark.parametrize("policy", ["history-max", "most-recent"])
def test_an_empty_history_gives_no_scale(policy) -> None:
    reason, _ = settle(evidence_of(amax_history_fwd=history(0.0, 0.0, 0.0, 0.0)), policy)
    assert isinstance(reason, str)
    assert "learned" in reason


@pytest.mark.parametrize("bad", [0.0, -2.0, math.inf, math.nan, torch.finfo(torch.float32).max, 3e38 * 1.1])
def test_an_unusable_scale_is_never_exported(bad) -> None:
    reason, _ = settle(
        evidence_of(scale_fwd=torch.tensor([bad, 1.0, 1.0]), amax_history_fwd=history(0, 1, 1, 1)), "learned"
    )
    assert isinstance(reason, str)
    assert "unusable" in reason


def test_a_stale_inverse_is_reported_and_not_used(tmp_path) -> None:
    state = llama.weights(layers=1)
    name = "model.layers.0.self_attn.o_proj"
    payload = te.delayed([4.0, 8.0, 1.0], [[0.0] * 3, [1.0, 1.0, 0.0]], scale_inv_fwd=torch.ones(3))
    extra = llama.states(state) | {f"{name}._extra_state": te.as_u8(te.pickled(payload))}
    checkpoint = inspect(llama.write(tmp_path, {**state, **extra}, llama.config(1)))
    scales = freeze(checkpoint)
    assert scales.inputs[name].value == 0.25
    assert scales.weights[name].value == 0.125
    assert any(note.where == name and "scale_inv" in note.text for note in checkpoint.notes)


def replay(amaxes: list[float], length: int, margin: int, algorithm: str) -> tuple[float, list[float]]:
    """Transformer Engine's update, written out again from its CUDA kernel, in Python floats rounded to float32."""
    rows, scale = [0.0] * length, 1.0
    for amax in amaxes:
        rows[0] = amax
        largest = max(rows) if algorithm == "max" else rows[0]
        if amax > 0:
            if math.isfinite(largest) and largest > 0:
                scale = float(torch.tensor(448.0) / torch.tensor(largest)) / 2**margin
            rows = [*rows[1:], rows[0]]
            rows[0] = 0.0
    return scale, rows


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3])
def test_the_update_rule_step_by_step(algorithm, margin) -> None:
    amaxes = (torch.rand(40) * 10).tolist()
    scale, _ = replay(amaxes, 5, margin, algorithm)
    window = amaxes[-5:] if algorithm == "max" else amaxes[-1:]
    assert updated(1.0, max(window), 448.0, margin) == scale


def test_bytesio_position_does_not_matter(tmp_path) -> None:
    state = llama.weights(layers=1)
    full: dict[str, Any] = dict(state)
    for key, value in llama.states(state).items():
        with te.te_names():
            import pickle

            stream = te.as_zip({k: v for k, v in pickle.loads(value.numpy().tobytes()).items() if k != "recipe"})
        assert isinstance(stream, io.BytesIO)
        full[key] = stream
    torch.save(full, tmp_path / "model.pt")
    assert len(freeze(inspect(tmp_path / "model.pt")).inputs) == 7
