"""Judge the learned scales before anybody relies on them: one line of advice for each kind of trouble."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .calibrate import covered, never_updated, usable
from .kernels import E4M3_MAX, SATURATES_ABOVE, amax, count_clipped
from .model import Checkpoint, ScaleEvidence, TrainedLinear

# a last amax this many times the median of the history is a spike: four octaves, well beyond a run's drift
_SPIKE = 16.0

ADVICE = {
    "no state": "static scales need calibration; or --scales dynamic, or --keep it in high precision",
    "never updated": "the layer did not run under FP8: calibrate it, or --keep it in high precision",
    "dead": "every amax is zero: the layer saw only zeros (an unused expert?); do not trust its scale",
    "poisoned": "the run overflowed here; the scale is from before: compare with an earlier checkpoint",
    "unusable": "no engine can use this scale: calibrate the layer, or --keep it in high precision",
    "contradictory": "the scale does not fit its own history: a damaged file? compare with another checkpoint",
    "not finite": "the run diverged: export an earlier checkpoint",
    "stale": "the weight outgrew its scale; convert recomputes that scale, --strict refuses instead",
    "short history": "fewer steps than configured were stored: the run was short or the window was cut",
    "spike": "the last amax is far above the median: look at the loss there, consider --scales history-max",
}


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str  # a key of ADVICE
    linear: str
    slot: str
    detail: str


def examine(
    checkpoint: Checkpoint, *, weights: bool = True, on_progress: Callable[[int, int, str], None] | None = None
) -> list[Finding]:
    """Return what is wrong, by layer. `weights=False` leaves the weights unread and cannot see stale scales."""
    findings: list[Finding] = []
    total, done = sum(linear.weight.numel for linear in checkpoint.linears), 0
    for linear in checkpoint.linears:
        if on_progress is not None:
            on_progress(done, total, linear.name)
        done += linear.weight.numel
        if linear.weight_evidence is None or linear.input_evidence is None:
            findings.append(Finding("no state", linear.name, "", linear.nothing_learned))
            continue
        findings += _slot(linear.name, "input", linear.input_evidence)
        of_weight = _slot(linear.name, "weight", linear.weight_evidence)
        findings += of_weight
        if weights:
            findings += _weight(linear, linear.weight_evidence)
    return findings


def _slot(name: str, slot: str, evidence: ScaleEvidence) -> list[Finding]:
    if never_updated(evidence):
        return [Finding("never updated", name, slot, "scale 1 and an empty history")]
    found = []
    history = torch.cat([torch.tensor([evidence.pending]), evidence.amax_history])
    finite = history[torch.isfinite(history)]
    bad = len(history) - len(finite)
    if bad:
        found.append(Finding("poisoned", name, slot, f"{bad} of {len(history)} amaxes are inf or NaN"))
    multiplier = evidence.multiplier
    if not usable(multiplier):
        found.append(Finding("unusable", name, slot, f"scale_fwd is {multiplier:g}"))
    # a history of one row is always zero beside a valid scale
    if len(evidence.amax_history) > 0 and not bool(history.any()):
        found.append(Finding("dead", name, slot, f"{len(history)} amaxes of zero"))
    configured = evidence.configured_history
    if configured is not None and configured != len(evidence.amax_history) + 1:
        found.append(
            Finding("short history", name, slot, f"{len(evidence.amax_history) + 1} rows, {configured} configured")
        )
    if evidence.algorithm == "max" and usable(multiplier) and not bad and covered(evidence) > 1.001:
        largest = float(evidence.amax_history.max())
        found.append(Finding("contradictory", name, slot, f"amax {largest:.4g} x scale {multiplier:.4g}"))
    positive = finite[1:][finite[1:] > 0]
    if len(positive) > 2:
        newest, median = float(positive[0]), float(positive.median())
        if newest > _SPIKE * median:
            found.append(Finding("spike", name, slot, f"last amax {newest:.4g}, median {median:.4g}"))
    return found


def _weight(linear: TrainedLinear, evidence: ScaleEvidence) -> list[Finding]:
    clipped, largest = 0, 0.0
    for lo, hi in linear.weight.chunks():
        rows = linear.weight.read(lo, hi)
        peak = amax(rows)
        if not math.isfinite(peak):
            return [Finding("not finite", linear.name, "weight", f"NaN or infinity in {linear.weight.origin}")]
        largest = max(largest, peak)
        if peak * evidence.multiplier > SATURATES_ABOVE:
            clipped += count_clipped(rows, evidence.multiplier)
    if not clipped or not usable(evidence.multiplier) or never_updated(evidence):
        return []
    return [
        Finding(
            "stale",
            linear.name,
            "weight",
            f"{clipped} codes clip: amax {largest:.4g}, the scale covers {E4M3_MAX / evidence.multiplier:.4g}",
        )
    ]
