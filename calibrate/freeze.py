"""Evidence to static scales, by a named policy.

`learned` is what the next training-time forward would use. `history-max` and `most-recent` recompute from the stored
amax history; they are for runs whose last scale is known to be bad, not for everyday use: Transformer Engine keeps one
row fewer than its scale has seen, and a history of length 1 stores none.
"""

import math

import torch
from torch import Tensor

from ..errors import RequestError
from ..kernels import E4M3_MAX, reciprocal
from ..model import Checkpoint, How, Note, Scale, ScaleEvidence, ScaleSet

POLICIES = ("learned", "history-max", "most-recent")
_FLT_MAX = torch.finfo(torch.float32).max
_FLT_MIN = torch.finfo(torch.float32).tiny
_SLACK = 1e-5  # of a quotient and a product in float32


def freeze(checkpoint: Checkpoint, policy: str = "learned") -> ScaleSet:
    """Settle one scale for every slot that has evidence; the rest is listed in `missing` with the reason."""
    if policy not in POLICIES:
        raise RequestError(f"no policy is called {policy!r}", hint=f"choose one of {', '.join(POLICIES)}")
    inputs: dict[str, Scale] = {}
    weights: dict[str, Scale] = {}
    missing: dict[str, str] = {}
    notes: list[Note] = []
    for linear in checkpoint.linears:
        for slot, evidence, found in (
            ("input", linear.input_evidence, inputs),
            ("weight", linear.weight_evidence, weights),
        ):
            if evidence is None:
                missing[linear.name] = linear.nothing_learned
                continue
            scale, texts = settle(evidence, policy)
            notes += [Note(f"{slot} scale: {text}", linear.name) for text in texts]
            if isinstance(scale, Scale):
                found[linear.name] = scale
            else:
                missing[linear.name] = f"{slot} scale: {scale} ({evidence.origin})"
    return ScaleSet(inputs, weights, missing, tuple(notes))


def settle(evidence: ScaleEvidence, policy: str) -> tuple[Scale | str, list[str]]:
    """Return the scale, or why there is none, and what the user should know about it."""
    if evidence.fp8_max != E4M3_MAX:
        return f"the forward format ends at {evidence.fp8_max:g}, only E4M3 can be exported", []
    if policy == "learned":
        multiplier, texts = _learned(evidence)
    else:
        multiplier, texts = _from_history(evidence, policy)
    if isinstance(multiplier, str):
        return multiplier, texts
    value = float(reciprocal(multiplier))
    if not usable(multiplier):
        return f"the scale is unusable: scale_fwd {multiplier:g}", texts
    return Scale(value, multiplier, How(policy), evidence.origin), texts


def usable(multiplier: float) -> bool:
    """Tell whether a multiplier and its reciprocal are both ordinary float32 numbers; FLT_MAX marks an overflow."""
    return 0 < multiplier < _FLT_MAX and _FLT_MIN <= float(reciprocal(multiplier)) < _FLT_MAX


def covered(evidence: ScaleEvidence) -> float:
    """Return the largest stored amax in units of what the scale covers: 1 when it just fits, 0 without a history."""
    if len(evidence.amax_history) == 0:
        return 0.0
    return float(evidence.amax_history.max()) * evidence.multiplier / (evidence.fp8_max * 2.0**-evidence.margin)


def never_updated(evidence: ScaleEvidence) -> bool:
    """Tell whether the slot still holds what a fresh module starts with."""
    return evidence.multiplier == 1.0 and evidence.pending == 0 and not bool(evidence.amax_history.any())


def _learned(evidence: ScaleEvidence) -> tuple[float | str, list[str]]:
    history, pending = evidence.amax_history, evidence.pending
    if never_updated(evidence):
        return "never updated: scale 1 and an empty history, as in a module that has not run under FP8", []
    unconverted = evidence.multiplier == 1.0 and not bool(history.any())
    if evidence.folds_pending or unconverted:
        return _fold(evidence)
    texts = []
    if not bool(torch.isfinite(history).all()) or not math.isfinite(pending):
        texts.append("inf or NaN in the amax history; training kept the scale from before, and so do we")
    elif pending > 0:
        texts.append(
            "an amax seen after the last update (an FP8 evaluation) is in no scale yet; the stored scale holds"
        )
    if len(history) == 0 or not bool(history.any()):
        texts.append("the history stores no amax (length 1 never does); the stored scale is what was learned")
    elif evidence.algorithm == "max":
        reached = covered(evidence)
        if reached < 1 - _SLACK:
            texts.append("the scale covers an amax that has left the stored history; the stored scale holds")
        elif reached > 1 + _SLACK:
            texts.append("the scale is too large for its own amax history: damaged? inputs would saturate")
    return evidence.multiplier, texts


def _fold(evidence: ScaleEvidence) -> tuple[float | str, list[str]]:
    """Apply the update that the trainer had put off to its next forward (Transformer Engine <= 1.5, pytorch/fp8.py)."""
    rows = [evidence.pending, *evidence.amax_history.tolist()]
    if evidence.algorithm == "custom":
        return "an update is pending and its algorithm is a user's function", []
    largest = evidence.pending if evidence.algorithm == "most_recent" else _max_with_nan(rows)
    multiplier = updated(evidence.multiplier, largest, evidence.fp8_max, evidence.margin, evidence.floors_scale)
    return multiplier, ["a pending amax was folded in, as the next training forward would have done"]


def updated(multiplier: float, amax: float, fp8_max: float, margin: int, floors: bool = False) -> float:
    """One step of delayed scaling in float32: fp8_max / amax / 2^margin, unchanged for a zero or non-finite amax.

    Source: transformer_engine/common/recipe/delayed_scaling.cu (1.6 to 2.20); with `floors`, pytorch/fp8.py up to 0.12.
    """
    if not (math.isfinite(amax) and amax > 0):
        return multiplier
    quotient = torch.tensor(fp8_max) / torch.tensor(amax)
    if floors:  # the logarithm is taken in float32 there too, which decides at the edges of a binade
        return float(torch.exp2(torch.floor(torch.log2(quotient)) - margin))
    return min(float(quotient / 2.0**margin), _FLT_MAX)


def _from_history(evidence: ScaleEvidence, policy: str) -> tuple[float | str, list[str]]:
    rows = torch.cat([torch.tensor([evidence.pending]), evidence.amax_history])
    usable = rows[torch.isfinite(rows) & (rows > 0)]
    texts = [] if bool(torch.isfinite(rows).all()) else ["inf or NaN in the amax history: ignored"]
    if len(usable) == 0:
        return "the amax history is empty, use the learned policy", texts
    amax = float(usable.max() if policy == "history-max" else usable[0])
    return updated(evidence.multiplier, amax, evidence.fp8_max, evidence.margin), texts


def _max_with_nan(rows: list[float]) -> float:
    values: Tensor = torch.tensor(rows)
    return float(values.max())
