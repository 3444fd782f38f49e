"""Transformer Engine extra states, pickled under Transformer Engine's own names without having it."""

import enum
import io
import pickle
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MODULE = "transformer_engine.common.recipe"


class _FormatHelper(namedtuple("_FormatHelper", "max_fwd max_bwd")):
    pass


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


class DelayedScaling:
    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


class Float8CurrentScaling(DelayedScaling):
    pass


class MXFP8BlockScaling(DelayedScaling):
    pass


class Float8BlockScaling(DelayedScaling):
    pass


_CLASSES = (_FormatHelper, Format, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling)


@contextmanager
def te_names() -> Iterator[None]:
    """Let pickle find the stand-ins where Transformer Engine's classes would be."""
    module = types.ModuleType(_MODULE)
    for cls in _CLASSES:
        cls.__module__ = _MODULE
        setattr(module, cls.__name__, cls)
    names = ("transformer_engine", "transformer_engine.common", _MODULE)
    for name in names:
        sys.modules[name] = module if name == _MODULE else types.ModuleType(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def delayed(
    scale: list[float],
    history: list[list[float]],
    *,
    margin: int = 0,
    algorithm: str = "max",
    recipe: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """The payload of a delayed-scaling state; `history` is [H][slots] as stored."""
    state: dict[str, Any] = {
        "scale_fwd": torch.tensor(scale),
        "amax_history_fwd": torch.tensor(history),
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.zeros(len(history), 2),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0},
    }
    if recipe:
        state["recipe"] = DelayedScaling(
            margin=margin, amax_history_len=len(history), amax_compute_algo=algorithm, fp8_format=Format.HYBRID
        )
    return {**state, **more}


def pickled(payload: object) -> bytes:
    with te_names():
        return pickle.dumps(payload, protocol=4)


def as_u8(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def as_zip(payload: object) -> io.BytesIO:
    """What 0.12 to 1.13 put into the state dict; the position is left at the end."""
    stream = io.BytesIO()
    torch.save(payload, stream)
    return stream


def edited(state: Tensor, change: Callable[[dict[str, Any]], None]) -> Tensor:
    """Unpickle a real state with the stand-ins, change it, pickle it again."""
    with te_names():
        payload = pickle.loads(state.numpy().tobytes())
    change(payload)
    return as_u8(pickled(payload))


def scale_of(state: Tensor) -> Tensor:
    """Read scale_fwd of a real state, independently of the product."""
    with te_names():
        return pickle.loads(state.numpy().tobytes())["scale_fwd"]
