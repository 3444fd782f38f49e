"""What every source with Hugging Face module names shares: sort the tensors into linears and the rest."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .. import arch
from ..errors import CheckpointError
from ..model import Checkpoint, LazyTensor, Note, ScaleEvidence, TrainedLinear
from ..store import Store

# (weight evidence, input evidence, why there is none)
Evidence = tuple[ScaleEvidence | None, ScaleEvidence | None, str]


def build(
    store: Store,
    *,
    source: str,
    recipe: str,
    evidence: Callable[[str], Evidence],
    consumed: Mapping[str, str],
    notes: Iterable[Note] = (),
) -> Checkpoint:
    """Assemble a Checkpoint. `consumed` are the keys that the source itself used or ignores, with the reason.

    Raises CheckpointError when a key would vanish.
    """
    config, ignored, notes = dict(store.config), dict(consumed), list(notes)
    dropped = _tied_head(store, config, notes)
    ignored.update(dropped)
    linears: list[TrainedLinear] = []
    reasons: dict[str, str] = {}
    used: set[str] = set()
    for key, tensor in store.tensors.items():
        if key in ignored or not arch.is_matrix(key, tensor):
            continue
        module = key.removesuffix(".weight")
        reason = arch.high_precision_reason(module, tensor.shape, config)
        if reason:
            reasons[module] = reason
            continue
        weight_evidence, input_evidence, nothing = evidence(module)
        bias_key = f"{module}.bias"
        bias = store.tensors.get(bias_key)
        if bias is not None and bias.shape != tensor.shape[:1]:
            raise CheckpointError(
                f"a bias of {list(bias.shape)} beside a weight of {list(tensor.shape)}",
                where=bias.origin,
                hint="the two are from different saves: write the checkpoint again",
            )
        used |= {key, bias_key} if bias else {key}
        linears.append(
            TrainedLinear(module, tensor, bias, arch.fused_set(module), weight_evidence, input_evidence, nothing)
        )
    plain = {key: t for key, t in store.tensors.items() if key not in used and key not in ignored}
    left = [key for key in store.objects if key not in ignored]
    if left:
        raise CheckpointError(
            "the checkpoint holds values that are neither tensors nor known training state",
            where=f"{store.path}: {', '.join(left[:5])}",
            hint="save only model.state_dict(), or remove these keys",
        )
    linears.sort(key=lambda linear: arch.natural(linear.name))
    return Checkpoint(
        source=source,
        recipe=recipe,
        linears=tuple(linears),
        plain=dict(sorted(plain.items(), key=lambda kv: arch.natural(kv[0]))),
        plain_reasons=dict(sorted(reasons.items(), key=lambda kv: arch.natural(kv[0]))),
        ignored=ignored,
        config=config,
        assets=store.assets,
        skipped_files=store.skipped_files,
        identity=store.identity,
        modified=store.modified,
        notes=(*store.notes, *notes),
    )


_WRAPPERS = ("module.", "_orig_mod.")


def unwrapped(store: Store) -> Store:
    """Take off what DistributedDataParallel and torch.compile put before every name."""
    names = (*store.tensors, *store.objects)
    for wrapper in _WRAPPERS:
        if names and all(name.startswith(wrapper) for name in names):
            return unwrapped(
                replace(
                    store,
                    tensors={key.removeprefix(wrapper): value for key, value in store.tensors.items()},
                    objects={key.removeprefix(wrapper): value for key, value in store.objects.items()},
                    notes=(*store.notes, Note(f"the prefix {wrapper!r} was taken off every name")),
                )
            )
    return store


def _tied_head(store: Store, config: dict[str, Any], notes: list[Note]) -> dict[str, str]:
    """torch.save keeps both names of a tied matrix. The flag must follow the bytes: servers trust it."""
    head = store.tensors.get("lm_head.weight")
    embedding = store.tensors.get("model.embed_tokens.weight")
    if not config.get("tie_word_embeddings") or head is None or embedding is None:
        return {}
    if _same(head, embedding):
        return {"lm_head.weight": "tied to model.embed_tokens.weight and equal to it"}
    config["tie_word_embeddings"] = False
    notes.append(
        Note("the config ties lm_head to the embedding but their values differ: written untied", "lm_head.weight")
    )
    return {}


def _same(a: LazyTensor, b: LazyTensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(a.read(lo, hi), b.read(lo, hi)) for lo, hi in a.chunks())
