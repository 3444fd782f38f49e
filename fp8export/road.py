"""The road: calls the seven verbs in order, and nothing else."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .calibrate import POLICIES, freeze, load_scales
from .errors import OutputError, RequestError
from .layout import Layout, Record
from .model import Checkpoint, ModelPlan, ScaleSet, Scheme
from .plan import make_plan
from .sources import read_checkpoint
from .store import open_store
from .targets import Options, lay_out
from .targets.hf_folder import PROVENANCE
from .writer import write

__all__ = ["Conversion", "claimed_scales", "convert", "inspect", "scales_for"]

Progress = Callable[[int, int, str], None]
_WEIGHTS = ("auto", "tensor", "channel")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What convert did, or with `dry_run` would do."""

    out: Path
    checkpoint: Checkpoint
    scales: ScaleSet
    plan: ModelPlan
    layout: Layout
    records: tuple[Record, ...]
    already_there: bool


def inspect(source: Path | str, *, source_name: str | None = None, hf_config: Path | None = None) -> Checkpoint:
    """Read what a checkpoint is and what its training learned, without reading weights."""
    return read_checkpoint(open_store(Path(source), hf_config), source_name)


def scales_for(checkpoint: Checkpoint, scales: str) -> ScaleSet:
    """Freeze by policy, read a scale file, or return nothing for `dynamic`."""
    if scales == "dynamic":
        return ScaleSet()
    if scales in POLICIES:
        return freeze(checkpoint, scales)
    path = Path(scales)
    if not path.is_file():
        raise RequestError(
            f"--scales {scales}: neither a policy nor a file", hint=f"choose {', '.join(POLICIES)}, dynamic or a file"
        )
    given = load_scales(path)
    unknown = (set(given.inputs) | set(given.weights)) - {linear.name for linear in checkpoint.linears}
    if unknown:
        raise RequestError(
            f"{len(unknown)} scales belong to no layer of this checkpoint",
            where=f"{path}: {', '.join(sorted(unknown)[:3])}",
            hint="freeze or calibrate this checkpoint, not another",
        )
    return given


def convert(
    source: Path | str,
    out: Path | str | None = None,
    *,
    to: str = "compressed-tensors",
    source_name: str | None = None,
    scales: str = "learned",
    weights: str = "auto",
    keep: Sequence[str] = (),
    strict: bool = False,
    shard_size: int | None = None,
    hf_config: Path | None = None,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint to a folder that a server loads; default destination is the source's name plus `-fp8`.

    Run again after a crash it finishes the job; run again after success it changes nothing. Raises the errors of
    `fp8export.errors`.
    """
    source = Path(source)
    if weights not in _WEIGHTS:
        raise RequestError(f"--weights {weights}", hint=f"choose one of {', '.join(_WEIGHTS)}")
    destination = Path(out) if out is not None else _default_out(source)
    if destination.is_dir() and source.resolve().is_relative_to(destination.resolve()):
        raise RequestError(
            "the checkpoint lies inside the destination", where=str(destination), hint="choose another -o"
        )
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()):
        raise RequestError(
            "the destination lies inside the checkpoint", where=str(destination), hint="choose another -o"
        )
    checkpoint = inspect(source, source_name=source_name, hf_config=hf_config)
    chosen = scales_for(checkpoint, scales)
    scheme = Scheme(scales if scales in (*POLICIES, "dynamic") else "file", weights, tuple(keep), strict)
    plan = make_plan(checkpoint, chosen, scheme)
    options = Options(to) if shard_size is None else Options(to, shard_size)
    layout = lay_out(to, plan, options)
    done = Conversion(destination, checkpoint, chosen, plan, layout, (), False)
    if dry_run:
        return done
    if destination.exists():
        return replace(done, records=_finished(destination, layout, checkpoint.modified), already_there=True)
    return replace(done, records=tuple(write(layout, destination, on_progress)))


def claimed_scales(out: Path) -> str:
    """Return the policy that an export says it was made with; `learned` when it says nothing."""
    try:
        policy = json.loads((out / PROVENANCE).read_bytes())["scheme"]["scales"]
    except (OSError, ValueError, KeyError, TypeError):
        return "learned"
    if policy == "file":
        raise RequestError("this export was made with a scale file", where=str(out), hint="name it with --scales FILE")
    return str(policy)


def _default_out(source: Path) -> Path:
    source = Path(os.path.abspath(source))  # a link keeps its own name
    return source.with_name((source.stem if source.is_file() else source.name) + "-fp8")


def _finished(out: Path, layout: Layout, modified: tuple[int, ...]) -> tuple[Record, ...]:
    """Accept a destination that this very command wrote earlier, from a source that has not been touched since."""
    provenance = out / PROVENANCE
    try:
        content = json.loads(provenance.read_bytes())
        same = content["fingerprint"] == layout.fingerprint
        records = tuple(content["linears"])
    except (OSError, ValueError, KeyError, TypeError):
        same, records = False, ()
    if not same or max(modified) > provenance.stat().st_mtime_ns:
        what = "the checkpoint was modified after it was exported" if same else "it is not this command's result"
        raise OutputError(
            f"the destination exists and {what}", where=str(out), hint="remove it, or choose another with -o"
        )
    return records
