"""Results as tables for a person and as plain data for a machine. Builds them, prints nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .health import ADVICE, Finding
from .model import Checkpoint, Note
from .report import LinearParity, ParityReport
from .road import Conversion
from .verify import VerifyReport

_MANY = 4


def inspection(checkpoint: Checkpoint, reason: str, container: str, findings: list[Finding]) -> RenderableType:
    linears = checkpoint.linears
    learned = sum(x.input_evidence is not None for x in linears)
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in {
        "source": f"{checkpoint.source}: {reason}",
        "container": container,
        "training": checkpoint.recipe,
        "layers": f"{len(linears)} linears, {learned} with training state; {len(checkpoint.plain)} other tensors",
        "high precision": _names(checkpoint.plain_reasons),
        "files copied": ", ".join(sorted(checkpoint.assets)) or "none",
        "files not copied": ", ".join(sorted(checkpoint.skipped_files)) or "none",
    }.items():
        table.add_row(key, Text(value))
    parts: list[RenderableType] = [table, Text()]
    if findings:
        parts.append(_findings(findings))
    else:
        parts.append(Text(f"health: all {len(linears)} layers are fit to be frozen", style="green"))
    parts += notes(checkpoint.notes)
    return Group(*parts)


def inspection_data(checkpoint: Checkpoint, reason: str, container: str, findings: list[Finding]) -> dict[str, Any]:
    return {
        "source": checkpoint.source,
        "reason": reason,
        "container": container,
        "recipe": checkpoint.recipe,
        "linears": [
            {
                "name": x.name,
                "shape": list(x.weight.shape),
                "learned": x.input_evidence is not None,
                "input_scale": x.input_evidence.scale if x.input_evidence else None,
                "weight_scale": x.weight_evidence.scale if x.weight_evidence else None,
                "reason": x.nothing_learned,
            }
            for x in checkpoint.linears
        ],
        "high_precision": dict(checkpoint.plain_reasons),
        "findings": [{**asdict(f), "advice": ADVICE[f.kind]} for f in findings],
        "notes": [note._asdict() for note in checkpoint.notes],
    }


def _findings(findings: list[Finding]) -> RenderableType:
    table = Table("trouble", "layers", "first", "advice", title="health", title_justify="left")
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    for kind, members in groups.items():
        first = members[0]
        where = f"{first.linear} {first.slot}: {first.detail}" if first.slot else f"{first.linear}: {first.detail}"
        table.add_row(kind, str(len(members)), where, ADVICE[kind])
    return table


def notes(found: Iterable[Note]) -> list[RenderableType]:
    """Equal texts once, with how many layers they concern."""
    groups: dict[str, list[str]] = {}
    for note in found:
        groups.setdefault(note.text, []).append(note.where)
    return [Text(f"note: {text} ({_listed(where)})") for text, where in groups.items()]


def layout(done: Conversion) -> RenderableType:
    table = Table("file", "tensors", "MB")
    for file in done.layout.files:
        table.add_row(file.name, str(len(file.entries)), f"{file.nbytes / 1e6:.1f}")
    for name, path in done.layout.copies.items():
        table.add_row(f"{name} (copied)", "", f"{path.stat().st_size / 1e6:.3f}")
    return Group(
        _summary(done), table, Text(f"nothing was written; {done.layout.nbytes / 1e6:.1f} MB would go to {done.out}")
    )


def layout_data(done: Conversion) -> dict[str, Any]:
    return {
        **_summary_data(done),
        "bytes": done.layout.nbytes,
        "files": {
            file.name: {e.name: {"dtype": e.dtype, "shape": list(e.shape)} for e in file.entries}
            for file in done.layout.files
        },
        "copies": sorted(done.layout.copies),
    }


def conversion(done: Conversion, verified: VerifyReport, judged: ParityReport | None, serve: str) -> RenderableType:
    parts: list[RenderableType] = [_summary(done)]
    if done.already_there:
        parts.append(Text(f"{done.out} was already there, complete and from this very command: nothing was written"))
    parts += [Text(), verification(verified)]
    if judged is not None:
        parts += [parity(judged, worst=True)]
    if verified.passed and (judged is None or judged.passed):
        parts += [Text(), Text(f"next: {serve}", style="bold")]
    return Group(*parts)


def conversion_data(
    done: Conversion, verified: VerifyReport, judged: ParityReport | None, serve: str
) -> dict[str, Any]:
    return {
        **_summary_data(done),
        "already_there": done.already_there,
        "verify": {"passed": verified.passed, **asdict(verified)},
        "parity": None if judged is None else {"passed": judged.passed, **asdict(judged)},
        "serve": serve if verified.passed and (judged is None or judged.passed) else None,
    }


def _summary(done: Conversion) -> RenderableType:
    plan = done.plan
    table = Table(show_header=False, box=None, pad_edge=False)
    kinds = Counter(record["weight"]["how"] for record in done.records)
    inputs = "dynamic, per token" if plan.scheme.dynamic_inputs else "static, per tensor"
    for key, value in {
        "from": f"{plan.source}: {plan.recipe}",
        "to": str(done.out),
        "weights": f"E4M3, {len(plan.linears)} linears, scales per {plan.grain}"
        + (f" ({', '.join(f'{count} {how}' for how, count in kinds.items())})" if kinds else ""),
        "inputs": f"E4M3, {inputs}" + ("" if plan.scheme.dynamic_inputs else f", {plan.scheme.scales}"),
        "high precision": _names(plan.kept),
    }.items():
        table.add_row(key, Text(value))
    return Group(table, *notes((*plan.notes, *_recomputed(done))))


def _recomputed(done: Conversion) -> list[Note]:
    return [
        Note(
            "the weight outgrew its learned scale, which was recomputed",
            f"{r['linear']}: {r['weight']['clipped_at_learned_scale']:.2%} would have clipped",
        )
        for r in done.records
        if r["weight"]["how"].startswith("recomputed")
    ]


def _summary_data(done: Conversion) -> dict[str, Any]:
    plan = done.plan
    return {
        "out": str(done.out),
        "source": plan.source,
        "recipe": plan.recipe,
        "grain": str(plan.grain),
        "scales": plan.scheme.scales,
        "linears": list(done.records) or [linear.name for linear in plan.linears],
        "high_precision": dict(plan.kept),
        "not_exported": {**plan.ignored, **plan.skipped_files},
        "notes": [note._asdict() for note in (*plan.notes, *_recomputed(done))],
    }


def verification(report: VerifyReport) -> RenderableType:
    head = f"{report.fp8_linears} FP8 linears, {report.files} files, {report.nbytes / 1e6:.1f} MB"
    head += f", {report.bits_per_weight} bits per weight"
    if report.passed:
        text = "verify: passed" + ("" if report.codes_read else " (codes not read)")
        return Text(f"{text}; {head}", style="green")
    table = Table("rule", "fault", "where", title=f"verify: {len(report.faults)} faults; {head}", title_justify="left")
    for fault in report.faults:
        table.add_row(fault.rule, fault.what, fault.where)
    return table


def parity(report: ParityReport, worst: bool = False) -> RenderableType:
    title = f"parity at depth {report.depth}: {report.exact} of {len(report.linears)} linears exact; reference is "
    title += "; ".join(text for text in (report.reference, f"{report.device}, {report.kernel}", report.data) if text)
    columns = ["layer", "weights", "input scale", "SQNR dB", "clipped", "flushed"]
    outputs = any(x.output_error is not None for x in report.linears)
    if outputs:
        columns += ["output error", "FP8 training", "export", "saturated", "headroom bits"]
    table = Table(*columns, title="the worst layers" if worst else None, title_justify="left")
    for linear in report.worst() if worst else report.linears:
        table.add_row(*_row(linear, outputs))
    parts: list[RenderableType] = [Text(title), table]
    if outputs:
        parts.append(
            Text(
                "output error: export against reference on the same input; the next two against high precision.",
                style="dim",
            )
        )
    if report.logits is not None:
        parts.append(_logits(report))
    parts += [Text(f"fault: {text}", style="red") for text in report.faults]
    parts.append(Text("parity: passed", style="green") if report.passed else Text("parity: FAILED", style="bold red"))
    return Group(*parts)


def _row(linear: LinearParity, outputs: bool) -> list[str]:
    weights = linear.exactness + (f" ({linear.why})" if linear.why else "")
    row = [
        linear.name,
        weights,
        linear.input_scale,
        f"{linear.sqnr_db:.2f}",
        f"{linear.clipped:.4%}",
        f"{linear.flushed:.4%}",
    ]
    if outputs:
        numbers = (linear.output_error, linear.training_error, linear.export_error)
        row += ["" if n is None else f"{n:.2e}" for n in numbers]
        row.append("" if linear.saturated_inputs is None else f"{linear.saturated_inputs:.4%}")
        row.append("" if linear.headroom_bits is None else f"{linear.headroom_bits:.1f}")
    return row


def _logits(report: ParityReport) -> RenderableType:
    found = report.logits
    assert found is not None
    sequence, position = found.kl_max_at
    table = Table("logits", "value", title_justify="left")
    rows: Mapping[str, str] = {
        "KL(reference || export) mean": f"{found.kl_mean:.3e}",
        "  p99 / max": f"{found.kl_p99:.3e} / {found.kl_max:.3e} at {sequence}:{position} (sequence:token)",
        "noise floor (same codes, another residual type)": f"{found.noise_floor_kl:.3e}",
        "KL(reference || high precision)": f"{found.high_precision_kl:.3e}",
        "top-1 / top-5 agreement": f"{found.top1_agreement:.2%} / {found.top5_agreement:.2%}",
        **{f"perplexity, {name}": f"{value:.4f}" for name, value in found.perplexity.items()},
        "tokens": str(found.tokens),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _names(reasons: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return "; ".join(f"{_listed(names)}: {reason}" for reason, names in groups.items()) or "none"


def _listed(names: list[str]) -> str:
    shown = [name for name in names if name][:_MANY]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more and shown else "")
