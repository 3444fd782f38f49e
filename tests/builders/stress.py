"""The example checkpoint with one thing wrong or unusual, nineteen times. Each edit changes the state dict."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from . import te

State = dict[str, Any]
DOWN = "model.layers.0.mlp.down_proj"
KEY = "model.layers.1.self_attn.k_proj"
UP = "model.layers.2.mlp.up_proj"
MARKER = "unpickled-and-executed"


def _edit(state: State, name: str, change: Any) -> None:
    state[f"{name}._extra_state"] = te.edited(state[f"{name}._extra_state"], change)


def _set_scale(name: str, slot: int, value: float) -> Any:
    def edit(state: State) -> None:
        _edit(state, name, lambda payload: payload["scale_fwd"].__setitem__(slot, value))

    return edit


def _set_weight(value: float) -> Any:
    def edit(state: State) -> None:
        state[f"{KEY}.weight"][3, 5] = value

    return edit


def _all(state: State, change: Any) -> None:
    for key in [key for key in state if key.endswith("._extra_state")]:
        state[key] = te.edited(state[key], change)


def never_ran_zeros(state: State) -> None:
    def fresh(payload: State) -> None:
        for key in ("scale_fwd", "scale_bwd"):
            payload[key].fill_(1)
        for key in ("amax_history_fwd", "amax_history_bwd"):
            payload[key].zero_()

    _edit(state, UP, fresh)


def never_ran_empty(state: State) -> None:
    state[f"{UP}._extra_state"] = torch.empty(0, dtype=torch.uint8)


def missing_extra_state(state: State) -> None:
    del state[f"{UP}._extra_state"]


class _Evil:
    def __reduce__(self) -> Any:
        return open, (MARKER, "w")


def malicious_pickle(state: State) -> None:
    _edit(state, KEY, lambda payload: payload["extra_fp8_variables"].__setitem__("x", _Evil()))


def truncated_pickle(state: State) -> None:
    state[f"{KEY}._extra_state"] = state[f"{KEY}._extra_state"][:5000].clone()


REFUSED: dict[str, tuple[Any, str, int]] = {
    # edit, what the message must name, exit code
    "nan_weight": (_set_weight(float("nan")), f"{KEY}.weight", 4),
    "inf_weight": (_set_weight(float("inf")), f"{KEY}.weight", 4),
    "inf_scale": (_set_scale(DOWN, 0, float("inf")), DOWN, 4),
    "nan_scale": (_set_scale(DOWN, 1, float("nan")), DOWN, 4),
    "zero_scale": (_set_scale(DOWN, 0, 0.0), DOWN, 4),
    "fp32max_scale": (_set_scale(DOWN, 0, torch.finfo(torch.float32).max), DOWN, 4),
    "never_ran_zeros": (never_ran_zeros, UP, 4),
    "never_ran_empty": (never_ran_empty, UP, 4),
    "missing_extra_state": (missing_extra_state, UP, 4),
    "malicious_pickle": (malicious_pickle, "open", 7),
    "truncated_pickle": (truncated_pickle, f"{KEY}._extra_state", 4),
}


def inf_in_history(state: State) -> None:
    _edit(state, DOWN, lambda payload: payload["amax_history_fwd"].__setitem__((-3, 0), float("inf")))


def pending_eval_amax(state: State) -> None:
    def change(payload: State) -> None:
        history = payload["amax_history_fwd"]
        history[0, 0] = 2 * history[:, 0].max()

    _edit(state, DOWN, change)


def window_dropped_max(state: State) -> None:
    def change(payload: State) -> None:
        payload["scale_fwd"][0] = torch.tensor(448.0) / (1.5 * payload["amax_history_fwd"][:, 0].max())

    _edit(state, DOWN, change)


def _cut_history(length: int) -> Any:
    def change(payload: State) -> None:
        payload["recipe"].amax_history_len = length
        for direction, largest in (("fwd", 448.0), ("bwd", 57344.0)):
            rows = payload[f"amax_history_{direction}"]
            kept = torch.cat([torch.zeros_like(rows[:1]), rows[len(rows) - length + 1 :]])
            payload[f"amax_history_{direction}"] = kept.clone()
            if length > 1:
                amax, scale = kept.max(0).values, payload[f"scale_{direction}"]
                payload[f"scale_{direction}"] = torch.where(amax > 0, torch.tensor(largest) / amax, scale)

    return lambda state: _all(state, change)


def weight_outgrew_scale(state: State) -> None:
    multiplier = float(te.scale_of(state[f"{KEY}._extra_state"])[1])
    state[f"{KEY}.weight"][0, 0] = 2.5 * 448 / multiplier


def te1x_no_recipe(state: State) -> None:
    def change(payload: State) -> None:
        del payload["recipe"]
        for direction in ("fwd", "bwd"):
            payload[f"scale_inv_{direction}"] = 1 / payload[f"scale_{direction}"]

    _all(state, change)


def te1x_bytesio(state: State) -> None:
    te1x_no_recipe(state)
    for key in [key for key in state if key.endswith("._extra_state")]:
        stream = io.BytesIO()
        with te.te_names():
            torch.save(pickle.loads(state[key].numpy().tobytes()), stream)
        state[key] = stream


CONVERTED: dict[str, tuple[Any, str]] = {
    # edit, words of the explanation
    "inf_in_history": (inf_in_history, "inf or NaN in the amax history"),
    "pending_eval_amax": (pending_eval_amax, "an amax seen after the last update"),
    "window_dropped_max": (window_dropped_max, "covers an amax that has left the stored history"),
    "history_16": (_cut_history(16), "history 16"),
    "history_1": (_cut_history(1), "the history stores no amax"),
    "weight_outgrew_scale": (weight_outgrew_scale, "the weight outgrew its learned scale"),
    "te1x_no_recipe": (te1x_no_recipe, "names no recipe"),
    "te1x_bytesio": (te1x_bytesio, "names no recipe"),
}


def scales_in(state: State, name: str) -> Tensor:
    """scale_fwd of a module after an edit, read independently of the product."""
    value = state[f"{name}._extra_state"]
    if isinstance(value, io.BytesIO):
        return torch.load(io.BytesIO(value.getvalue()), weights_only=True)["scale_fwd"]
    return te.scale_of(value)
