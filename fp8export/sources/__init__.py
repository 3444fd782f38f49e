"""Whose scales, which direction, which names. Each source is a module with `recognise` and `read`."""

from typing import Protocol

from ..errors import CheckpointError, RequestError
from ..model import Checkpoint
from ..store import Store
from . import hf_plain, te_fp8
from .hf_modules import unwrapped

__all__ = ["SOURCES", "Source", "read_checkpoint", "recognise"]


class Source(Protocol):
    def recognise(self, store: Store) -> str | None:
        """Return the reason to believe that the store is of this kind, or None."""

    def read(self, store: Store) -> Checkpoint: ...


SOURCES: dict[str, Source] = {
    "hf_plain": hf_plain,
    "te_fp8": te_fp8,
}


def recognise(store: Store, name: str | None = None) -> tuple[str, str]:
    """Return the source's name and the reason. Raises CheckpointError when none or several fit and none was named."""
    if name is not None and name not in SOURCES:
        raise RequestError(f"no source is called {name!r}", hint=f"choose one of {', '.join(SOURCES)}")
    if name is not None:
        return name, "named by --from"
    believers = {key: reason for key, source in SOURCES.items() if (reason := source.recognise(store))}
    if len(believers) == 1:
        return next(iter(believers.items()))
    if believers:
        listed = "; ".join(f"{key}: {reason}" for key, reason in believers.items())
        raise CheckpointError(f"several sources fit: {listed}", where=str(store.path), hint="choose one with --from")
    quantized = store.config.get("quantization_config")
    raise CheckpointError(
        "already quantised checkpoints are not a source" if quantized else "no source recognises this checkpoint",
        where=f"{store.path}: {', '.join(list(store.tensors)[:4])} …",
        hint="convert from the training checkpoint" if quantized else f"known sources: {', '.join(SOURCES)}",
    )


def read_checkpoint(store: Store, name: str | None = None) -> Checkpoint:
    return SOURCES[recognise(store, name)[0]].read(unwrapped(store))
