"""Decide: Checkpoint + ScaleSet + Scheme -> ModelPlan. Reads no weight."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .errors import RequestError, ScaleError
from .model import Checkpoint, Grain, ModelPlan, Note, QuantizedLinear, Scale, ScaleSet, Scheme, TrainedLinear

_REMEDIES = (
    "--scales dynamic (no static scales at all), a scale file from calibration (--scales FILE), "
    "or --keep PATTERN (leave the layer in high precision)"
)


def make_plan(checkpoint: Checkpoint, scales: ScaleSet, scheme: Scheme) -> ModelPlan:
    """Settle what is quantised, how finely, and with which scales.

    Raises ScaleError when a layer has no usable static scale, RequestError when a pattern matches nothing.
    """
    kept, notes = kept_layers(checkpoint, scheme.keep)
    chosen = [linear for linear in checkpoint.linears if linear.name not in kept]
    if not chosen:
        raise ScaleError(
            "nothing is left to quantise", where=checkpoint.source, hint="check --keep and that this is a decoder model"
        )
    if scheme.dynamic_inputs:
        if scheme.weights == "tensor":
            raise RequestError(
                "dynamic inputs go with per-channel weights", hint="leave --weights out, engines run no other pair"
            )
        linears = tuple(QuantizedLinear(c.name, c.weight, c.bias, c.fused_set, None, None) for c in chosen)
        grain = Grain.CHANNEL
    else:
        linears, more = _static(chosen, scales, scheme)
        notes += more
        grain = _grain(linears, scheme.weights)
        if scheme.strict and grain is Grain.TENSOR and _grain(linears, "auto") is Grain.CHANNEL:
            raise ScaleError(
                "per tensor, fused sets that learned different weight scales would be unified",
                where=checkpoint.source,
                hint="leave --strict out, or keep the learned scales with --weights channel",
            )
    plain = dict(checkpoint.plain)
    for linear in checkpoint.linears:
        if linear.name in kept:
            plain[f"{linear.name}.weight"] = linear.weight
            if linear.bias is not None:
                plain[f"{linear.name}.bias"] = linear.bias
    names = {linear.name for linear in chosen}
    return ModelPlan(
        source=checkpoint.source,
        recipe=checkpoint.recipe,
        grain=grain,
        linears=linears,
        plain=plain,
        kept={**checkpoint.plain_reasons, **kept},
        ignored=checkpoint.ignored,
        config=checkpoint.config,
        assets=checkpoint.assets,
        skipped_files=checkpoint.skipped_files,
        identity=checkpoint.identity,
        modified=checkpoint.modified,
        scheme=scheme,
        notes=(
            *checkpoint.notes,
            *(n for n in scales.notes if n.where in names and not scheme.dynamic_inputs),
            *notes,
        ),
    )


def kept_layers(checkpoint: Checkpoint, patterns: Iterable[str]) -> tuple[dict[str, str], list[Note]]:
    """Return the layers that patterns leave in high precision, with the reason.

    Closed over fused sets: engines refuse a set of which only some members are quantised. Raises RequestError for a
    pattern that matches nothing.
    """
    kept: dict[str, str] = {}
    names = [linear.name for linear in checkpoint.linears]
    for pattern in patterns:
        hits = [name for name in names if matches(pattern, name)]
        if not hits and not any(matches(pattern, name) for name in checkpoint.plain_reasons):
            raise RequestError(
                f"--keep {pattern!r} matches no layer",
                where=f"layers are called {', '.join(names[:3])} …",
                hint="patterns are shell globs over whole names, or regular expressions after `re:`",
            )
        kept.update(dict.fromkeys(hits, f"--keep {pattern}"))
    sets = {linear.fused_set for linear in checkpoint.linears if linear.name in kept}
    notes = []
    for linear in checkpoint.linears:
        if linear.fused_set in sets and linear.name not in kept:
            kept[linear.name] = "multiplied as one with a layer that is kept"
            notes.append(Note("kept too: engines multiply it as one with a layer named by --keep", linear.name))
    return kept, notes


def matches(pattern: str, name: str) -> bool:
    """Shell glob over the whole name, or `re:` and a regular expression that must match from the start."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise RequestError(
                f"--keep {pattern!r} is not a regular expression: {error}", hint="mind the quoting"
            ) from error
    return fnmatchcase(name, pattern)


def _static(
    chosen: list[TrainedLinear], scales: ScaleSet, scheme: Scheme
) -> tuple[tuple[QuantizedLinear, ...], list[Note]]:
    without = {
        c.name: scales.missing.get(c.name, "not in the scale set") for c in chosen if c.name not in scales.inputs
    }
    without |= {c.name: scales.missing[c.name] for c in chosen if c.name in scales.missing}
    if without:
        raise ScaleError(
            f"{len(without)} of {len(chosen)} layers have no static scale: {_group(without)}",
            where=", ".join(list(without)[:5]) + (" …" if len(without) > 5 else ""),
            hint=_REMEDIES,
        )
    notes: list[Note] = []
    largest: dict[str, Scale] = {}
    for linear in chosen:
        mine, best = scales.inputs[linear.name], largest.get(linear.fused_set)
        if best is None or mine.value > best.value:
            largest[linear.fused_set] = mine
    linears = []
    for linear in chosen:
        shared = largest[linear.fused_set]
        if shared.value != scales.inputs[linear.name].value:
            if scheme.strict:
                raise ScaleError(
                    "layers that share their input learned different input scales",
                    where=linear.name,
                    hint="leave --strict out to take the largest of the set",
                )
            notes.append(Note("the input scale was raised to the largest of its fused set", linear.name))
        linears.append(
            QuantizedLinear(
                linear.name, linear.weight, linear.bias, linear.fused_set, scales.weights.get(linear.name), shared
            )
        )
    return tuple(linears), notes


def _grain(linears: tuple[QuantizedLinear, ...], wanted: str) -> Grain:
    """`auto` loses nothing: per tensor only where every fused set was trained with one weight scale."""
    if wanted != "auto":
        return Grain(wanted)
    values: dict[str, set[float | None]] = {}
    for linear in linears:
        # an unknown scale differs from every other
        key = linear.weight_scale.multiplier if linear.weight_scale else -float(len(values) + 1)
        values.setdefault(linear.fused_set, set()).add(key)
    return Grain.TENSOR if all(len(v) == 1 for v in values.values()) else Grain.CHANNEL


def _group(reasons: Mapping[str, str]) -> str:
    texts = list(dict.fromkeys(reason.partition(" (")[0] for reason in reasons.values()))
    return "; ".join(texts[:3])
