"""scales.json: static scales as a file that a person can read, compare and edit."""

import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ScaleError
from ..kernels import reciprocal
from ..model import How, Scale, ScaleSet
from ..store.disk import read_json
from .freeze import usable

_VERSION = 1


def save_scales(scales: ScaleSet, without: Container[str] = ()) -> bytes:
    """Return the JSON text, less the layers named by `without`. Numbers have the digits to return the same float32."""

    def table(items: Any) -> dict[str, Any]:
        return {
            name: {"scale": s.value, "multiplier": s.multiplier, "how": str(s.how), "origin": s.origin}
            for name, s in items.items()
            if name not in without
        }

    content = {
        "version": _VERSION,
        "meaning": "real = code * scale; multiplier is what the trainer multiplied by before the cast",
        "inputs": table(scales.inputs),
        "weights": table(scales.weights),
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def load_scales(path: Path) -> ScaleSet:
    """Read scales.json. `multiplier` may be left out and is then the float32 reciprocal.

    Raises ScaleError for a scale that is not finite and positive, or contradicts its multiplier.
    """
    try:
        content = read_json(path)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}, this program reads {_VERSION}")
        inputs, weights = (
            {name: _scale(path, part, name, item) for name, item in content[part].items()}
            for part in ("inputs", "weights")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, CheckpointError) as error:
        raise ScaleError(
            f"not a scale file: {error}", where=str(path), hint="write one with `fp8export freeze CKPT -o scales.json`"
        ) from error
    return ScaleSet(inputs, weights)


def _scale(path: Path, part: str, name: str, item: dict[str, Any]) -> Scale:
    value = _float32(item["scale"])
    multiplier = _float32(item.get("multiplier", float(reciprocal(value))))
    if not (math.isfinite(value) and value >= torch.finfo(torch.float32).tiny and usable(multiplier)):
        raise ScaleError(
            f"scale {value:g} is unusable", where=f"{path}::{part}.{name}", hint="it must be finite and positive"
        )
    if abs(value * multiplier - 1) > 1e-6:
        raise ScaleError(
            f"scale {value:g} is not 1 / multiplier {multiplier:g}",
            where=f"{path}::{part}.{name}",
            hint="change both, or leave the multiplier out",
        )
    return Scale(value, multiplier, How(item.get("how", "computed")), str(item.get("origin", path.name)))


def _float32(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(torch.tensor(value, dtype=torch.float32))
