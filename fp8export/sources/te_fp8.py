"""Transformer Engine modules under Hugging Face names: `X.weight` beside `X._extra_state`, every container since 0.1.

Slots of a Linear's forward state: 0 input, 1 weight, 2 output (transformer_engine/pytorch/csrc/common.h, 0.10 to 2.19;
0.1 to 0.5 lack the output). `scale_fwd` multiplies before the cast. After an update the newest amax lies in the last
row and row 0 is the landing place for the next one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .. import arch
from ..errors import CheckpointError
from ..kernels import reciprocal
from ..model import Checkpoint, LazyTensor, Note, ScaleEvidence
from ..store import Store
from ..store.safe_pickle import Inert, load_extra_state
from . import hf_modules

_KEY = "._extra_state"
_STATE_LIMIT = 64 << 20  # a history of 1024 steps takes 20 KB; an old global buffer a few MB
_INPUT, _WEIGHT = 0, 1
# order of the list that 0.1 and 0.2 saved (pytorch/module.py)
_LIST_FIELDS = (
    *("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", "global_fp8_buffer"),
    *("update_amax_and_scale_fwd", "global_fp8_buffer_pos_fwd", "global_fp8_buffer_pos_bwd"),
    *("autocast_id_fwd", "autocast_id_bwd"),
)
_STATELESS = {
    "Float8CurrentScaling": "current scaling: every scale was recomputed from the tensor at hand",
    "Float8BlockScaling": "block scaling: every scale was recomputed from the tensor at hand",
    "MXFP8BlockScaling": "MXFP8 scaling: every scale was recomputed from the tensor at hand",
    "NVFP4BlockScaling": "NVFP4 scaling: every scale was recomputed from the tensor at hand",
}


@dataclass(frozen=True, slots=True)
class DelayedState:
    """The forward half of one module's delayed-scaling state."""

    scale: Tensor  # [slots]
    history: Tensor  # [H, slots] as stored
    pending: Tensor  # [slots]
    folds_pending: bool
    floors_scale: bool
    recipe: str
    algorithm: str
    margin: int
    fp8_max: float
    configured_history: int | None
    stale_inverse: bool


def recognise(store: Store) -> str | None:
    count = sum(key.endswith(_KEY) for key in (*store.tensors, *store.objects))
    return f"{count} modules carry a Transformer Engine _extra_state" if count else None


def read(store: Store) -> Checkpoint:
    states: dict[str, DelayedState | str] = {}
    origins: dict[str, str] = {}
    consumed: dict[str, str] = {}
    for key, value in (*store.tensors.items(), *store.objects.items()):
        if not key.endswith(_KEY):
            continue
        module = key.removesuffix(_KEY)
        origins[module] = value.origin if isinstance(value, LazyTensor) else key
        states[module] = decode(value, origins[module])
        consumed[key] = "training state, read for its scales"
        weight = store.tensors.get(f"{module}.weight")
        plain = weight is not None and arch.is_matrix(f"{module}.weight", weight)
        if not plain and isinstance(states[module], DelayedState):
            raise CheckpointError(
                "this Transformer Engine module is not a plain Linear under a Hugging Face name",
                where=origins[module],
                hint="only te.Linear in place of nn.Linear is read so far",
            )
    notes = [
        Note("the stored scale_inv is not 1 / scale: the scale was taken", module)
        for module, state in states.items()
        if isinstance(state, DelayedState) and state.stale_inverse
    ]

    def evidence(module: str) -> hf_modules.Evidence:
        state = states.get(module, "no _extra_state: the layer never ran under FP8, or its state was stripped")
        if isinstance(state, str):
            return None, None, state
        if len(state.scale) not in (2, 3):
            raise CheckpointError(
                f"the state has {len(state.scale)} slots, a Linear has 3",
                where=origins[module],
                hint="only te.Linear in place of nn.Linear is read so far",
            )
        return _slot(state, _WEIGHT, origins[module]), _slot(state, _INPUT, origins[module]), ""

    return hf_modules.build(
        store, source="te_fp8", recipe=_describe(states), evidence=evidence, consumed=consumed, notes=notes
    )


def decode(value: object, origin: str) -> DelayedState | str:
    """Return the delayed-scaling state inside any container of any version, or why there is none.

    Raises CheckpointError for damaged data and UnsafePickleError for a pickle outside the allow-list.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, LazyTensor):
        if value.numel == 0:
            return "an empty _extra_state: the layer never ran under FP8, or its recipe learns no scales"
        if value.dtype != torch.uint8 or len(value.shape) != 1 or value.numel > _STATE_LIMIT:
            raise _damaged(f"an _extra_state of type {value.dtype}, shape {value.shape}", origin)
        value = value.read().numpy().tobytes()
    if isinstance(value, bytes):
        value = load_extra_state(value, origin) if value else None
    if isinstance(value, list) and len(value) == len(_LIST_FIELDS):
        value = dict(zip(_LIST_FIELDS, value, strict=True))
    if value is None or value == {}:
        return "an _extra_state of None: the layer never ran under FP8"
    if not isinstance(value, Mapping):
        raise _damaged(f"an _extra_state that is a {type(value).__name__}", origin)
    payload = {key: _tensor(item) for key, item in value.items()}
    if "scale_fwd" not in payload:
        name = type(payload.get("recipe")).__name__
        return _STATELESS.get(name, f"recipe {name}: it stored no scales")
    return _delayed(payload, origin)


def _delayed(payload: Mapping[str, Any], origin: str) -> DelayedState:
    scale, history = payload["scale_fwd"], payload.get("amax_history_fwd")
    if not (
        _is_plain(scale)
        and _is_plain(history)
        and scale.dtype == history.dtype == torch.float32
        and scale.ndim == 1
        and history.ndim == 2
        and history.shape[0] > 0
        and history.shape[1] == len(scale)
    ):
        raise _damaged("scale_fwd and amax_history_fwd do not fit each other", origin)
    recipe = payload.get("recipe")
    settings = recipe.state if isinstance(recipe, Inert) else {}
    extra = payload.get("extra_fp8_variables")
    extra = extra if isinstance(extra, Mapping) else payload
    pending = history[0]
    # Up to 1.5 the update ran at the start of the next forward. The key at the top level is the only sure sign: later
    # versions carry the old entries of extra_fp8_variables along when they re-save.
    deferred = "global_fp8_buffer" in payload
    if deferred:
        pending = _reduced(payload["global_fp8_buffer"], extra, pending)
    update = extra.get("update_amax_and_scale_fwd")
    folds = deferred and (update if isinstance(update, bool) else bool(pending.any()))
    # the weight's inverse may lag in 1.x while a cached weight is reused; the input's may not
    inverse = payload.get("scale_inv_fwd")
    stale = (
        _is_plain(inverse) and inverse.shape == scale.shape and bool((inverse[_INPUT] * scale[_INPUT] - 1).abs() > 1e-5)
    )
    active = scale[scale != 1]
    return DelayedState(
        scale=scale,
        history=history,
        pending=pending,
        folds_pending=folds,
        # 0.12 and older floor the scale to a power of two and nothing else tells them from 0.13
        floors_scale=deferred and len(active) > 0 and bool((torch.frexp(active).mantissa == 0.5).all()),
        recipe=type(recipe).__name__ if recipe is not None else "",
        algorithm=_algorithm(settings.get("amax_compute_algo")),
        margin=_margin(settings.get("margin", 0), origin),
        fp8_max=_forward_max(extra),
        configured_history=length if isinstance(length := settings.get("amax_history_len"), int) else None,
        stale_inverse=stale,
    )


def _slot(state: DelayedState, slot: int, origin: str) -> ScaleEvidence:
    multiplier = state.scale[slot]
    return ScaleEvidence(
        scale=float(reciprocal(multiplier)),
        multiplier=float(multiplier),
        amax_history=state.history[1:, slot].flip(0),
        pending=float(state.pending[slot]),
        folds_pending=state.folds_pending,
        floors_scale=state.floors_scale,
        algorithm=state.algorithm,
        margin=state.margin,
        fp8_max=state.fp8_max,
        configured_history=state.configured_history,
        origin=f"{origin}[scale_fwd[{slot}]]",
    )


def _reduced(buffer: object, extra: Mapping[str, Any], local: Tensor) -> Tensor:
    """In a multi-rank run up to 1.5 the reduced amax waits in a buffer that all modules share (pytorch/fp8.py)."""
    try:
        entry = buffer[f"FWD_AMAX_{extra['autocast_id_fwd']}"][extra["global_fp8_buffer_pos_fwd"]]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return local
    entry = _tensor(entry)
    return entry if isinstance(entry, Tensor) and _is_plain(entry) and entry.shape == local.shape else local


def _forward_max(extra: Mapping[str, Any]) -> float:
    """448 for E4M3 forward, the only forward format Transformer Engine accepts; older states say so, newer imply it."""
    value = extra.get("fp8_max_fwd", 448.0)
    return float(value) if isinstance(value, int | float) else 448.0


def _algorithm(value: object) -> str:
    """1.x states do not say; `max` is the framework's default since 0.12."""
    if value is None:
        return "max (assumed)"
    return value if isinstance(value, str) else "custom"


def _margin(value: object, origin: str) -> int:
    if type(value) is not int or abs(value) > 64:
        raise _damaged(f"a margin of {value!r}", origin)
    return value


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided


def _tensor(value: object) -> object:
    return value.read() if isinstance(value, LazyTensor) else value


def _damaged(what: str, origin: str) -> CheckpointError:
    return CheckpointError(what, where=origin, hint="not a state that Transformer Engine writes: fetch the file again")


def _describe(states: Mapping[str, DelayedState | str]) -> str:
    delayed = [s for s in states.values() if isinstance(s, DelayedState)]
    if not delayed:
        reason = Counter(s for s in states.values() if isinstance(s, str)).most_common(1)
        return f"Transformer Engine, nothing learned: {reason[0][0]}" if reason else "Transformer Engine"
    first = delayed[0]
    length = first.configured_history or len(first.history)
    assumed = (
        ""
        if first.recipe
        else "; the state names no recipe (Transformer Engine 1.x or older): margin 0 and max assumed"
    )
    return (
        f"Transformer Engine delayed scaling: E4M3 forward, history {length}, {first.algorithm}, "
        f"margin {first.margin}, {len(delayed)} modules{assumed}"
    )
