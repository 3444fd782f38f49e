"""What all Hugging Face style folders share: shards, index, config, copies, the model card and the provenance file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__, arch
from ..layout import Entry, Job, Layout, OutFile, Record, digest, fingerprint
from ..model import DTYPE_NAMES, Grain, LazyTensor, ModelPlan, QuantizedLinear
from ..quantize import copy_rows, quantize_set

PROVENANCE = "fp8export.json"
_CARD, _OLD_CARD = "README.md", "README.source.md"


@dataclass(frozen=True, slots=True)
class Options:
    target: str
    shard_size: int = 5_000_000_000  # what Hugging Face's own writer uses


def lay_out(plan: ModelPlan, options: Options, quantization: Mapping[str, Any], serve: str) -> Layout:
    """Lay out shards of whole jobs, so that a linear and its scales are never apart."""
    jobs = [_set_job(members, plan) for members in plan.fused_sets.values()]
    jobs += [_plain_job(name, tensor) for name, tensor in plan.plain.items()]
    files = _shards(sorted(jobs, key=lambda job: arch.natural(job.entries[0].name)), options.shard_size)
    copies = dict(plan.assets)
    copies.pop(PROVENANCE, None)
    if _CARD in copies:  # ours takes its name
        copies[_free_name(copies)] = copies.pop(_CARD)
    identity = fingerprint(
        files,
        copies,
        {
            "source": plan.identity,
            "version": __version__,
            **asdict(options),
            "scheme": asdict(plan.scheme),
            "quantization": quantization,
            "config": plan.config,
            "scales": [
                (x.name, x.weight_scale and x.weight_scale.multiplier, x.input_scale and x.input_scale.value)
                for x in plan.linears
            ],
        },
    )

    def finish(records: list[Record]) -> Mapping[str, bytes]:
        sidecars: dict[str, bytes] = {}
        if len(files) > 1:
            sidecars["model.safetensors.index.json"] = _index(files)
        sidecars[_CARD] = _card(plan, options, records, serve).encode(errors="replace")
        sidecars[PROVENANCE] = _json(_provenance(plan, options, records, identity))
        # the file without which nothing loads comes last
        sidecars["config.json"] = _json({**plan.config, "quantization_config": quantization})
        return sidecars

    return Layout(files, copies, finish, identity, digest([identity, plan.modified]))


def ignore_list(plan: ModelPlan) -> list[str]:
    """Full names of all modules a loader might take for a quantised linear: derived from the data, no patterns."""
    modules = {module for module in plan.kept if not arch.is_embedding(module)}
    if plan.config.get("tie_word_embeddings", True):
        modules.add("lm_head")  # exists in the model though not in the file
    return sorted(modules, key=arch.natural)


def _free_name(taken: Mapping[str, object]) -> str:
    names = [_OLD_CARD, *(f"README.source-{i}.md" for i in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def _set_job(members: tuple[QuantizedLinear, ...], plan: ModelPlan) -> Job:
    entries: list[Entry] = []
    for linear in members:
        rows = linear.weight.shape[0]
        entries.append(Entry(f"{linear.name}.weight", linear.weight.shape, "F8_E4M3"))
        shape = (rows, 1) if plan.grain is Grain.CHANNEL else (1,)
        entries.append(Entry(f"{linear.name}.weight_scale", shape, "F32"))
        if linear.input_scale is not None:
            entries.append(Entry(f"{linear.name}.input_scale", (1,), "F32"))
        if linear.bias is not None:
            entries.append(Entry(f"{linear.name}.bias", linear.bias.shape, DTYPE_NAMES[linear.bias.dtype]))
    return Job(tuple(entries), lambda sink: quantize_set(members, plan.grain, plan.scheme.strict, sink))


def _plain_job(name: str, tensor: LazyTensor) -> Job:
    def run(sink: Any) -> list[Record]:
        copy_rows(name, tensor, sink)
        return []

    return Job((Entry(name, tensor.shape, DTYPE_NAMES[tensor.dtype]),), run)


def _shards(jobs: Iterable[Job], limit: int) -> tuple[OutFile, ...]:
    groups: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if groups[-1] and size + job.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += job.nbytes
    if len(groups) == 1:
        return (OutFile("model.safetensors", tuple(groups[0])),)
    return tuple(
        OutFile(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)
    )


def _index(files: tuple[OutFile, ...]) -> bytes:
    total = sum(entry.nbytes for file in files for entry in file.entries)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _provenance(plan: ModelPlan, options: Options, records: list[Record], identity: str) -> dict[str, Any]:
    return {
        "fp8export": __version__,
        "fingerprint": identity,
        "source": {"kind": plan.source, "recipe": plan.recipe, "identity": plan.identity},
        "target": options.target,
        "scheme": {**asdict(plan.scheme), "grain": str(plan.grain)},
        "linears": sorted(records, key=lambda record: arch.natural(record["linear"])),
        "high_precision": dict(plan.kept),
        "not_exported": {**plan.ignored, **plan.skipped_files},
        "notes": [{"text": note.text, "where": note.where} for note in plan.notes],
    }


def _card(plan: ModelPlan, options: Options, records: list[Record], serve: str) -> str:
    changed: dict[str, int] = {}
    for record in records:
        changed[record["weight"]["how"]] = changed.get(record["weight"]["how"], 0) + 1
    inputs = "dynamic, one scale per token" if plan.scheme.dynamic_inputs else "static, one scale per tensor"
    lines = [
        "---",
        "tags: [fp8, e4m3, compressed-tensors]",
        "---",
        f"# FP8 export of a {plan.config.get('model_type', 'transformer')} checkpoint",
        "",
        f"Made by fp8export {__version__} for {options.target}.",
        "",
        f"- Training: {plan.recipe}",
        f"- Weights: E4M3, {len(plan.linears)} linears, scales per {plan.grain}",
        *(f"  - weight scale {how}: {count}" for how, count in changed.items()),
        f"- Inputs: E4M3, {inputs}",
        f"- High precision: {', '.join(plan.kept) or 'norms and embeddings'}",
        f"- Where each scale came from: `{PROVENANCE}`",
        "",
        "```",
        serve.format(path="."),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
