"""Compare an export with the checkpoint it came from, reading both from disk.

Three depths, in order of weight: *weights* (codes and scales are exact, or explained), *linears* (teacher-forced layer
outputs), *logits* (the whole model against its noise floor). The reference is the training-time FP8 forward: the
checkpoint's weight and the learned multipliers, float32 accumulation.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..calibrate import freeze
from ..errors import CheckpointError, RequestError
from ..model import Checkpoint, ScaleSet
from ..report import LinearParity, ParityReport
from ..store import open_store
from ..targets import read_format
from .codes import judge_config, judge_plain, judge_weight
from .logits import FLOOR_FACTOR, Forwards, judge_logits, logits_faults
from .outputs import OUTPUT_TOLERANCE, draw_inputs, judge_output, outside_tolerance
from .stored import pair_linears

__all__ = ["DEPTHS", "judge"]

DEPTHS = ("weights", "linears", "logits")
Progress = Callable[[int, int, str], None]


def _compare_with_training(linear: LinearParity, scales: ScaleSet, trained: ScaleSet) -> None:
    """An export that holds what it was asked to hold is exact only if that is what training used."""
    for asked, learned, slot in (
        (scales.weights.get(linear.name), trained.weights.get(linear.name), "weight"),
        (scales.inputs.get(linear.name), trained.inputs.get(linear.name), "input"),
    ):
        if asked is None or (learned is not None and asked.multiplier == learned.multiplier):
            continue
        if slot == "weight" and linear.exactness == "exact":
            linear.exactness, linear.why = "requantised", f"{asked.how} scale instead of the learned one"
        if slot == "input" and linear.input_scale in ("exact", "unified"):
            linear.input_scale = str(asked.how)


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """One layer a core, one thread an operation: pieces that fit the cache are too small to be shared among cores."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool
    torch.set_num_threads(threads)


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RequestError(f"the device {name!r} cannot be used: {error}", hint="cpu, cuda, or cuda:N") from error
    return name


def judge(
    checkpoint: Checkpoint,
    scales: ScaleSet,
    out: Path,
    *,
    depth: str = "weights",
    tokens: Tensor | None = None,
    data_name: str = "",
    device: str | None = None,
    on_progress: Progress | None = None,
) -> ParityReport:
    """Judge the export at `out`. `tokens` is int64 [sequences, length]; without it the linears depth draws its inputs.

    The report carries the verdict; nothing is raised for a bad one. Raises CheckpointError when `out` cannot be read.
    """
    if depth not in DEPTHS:
        raise RequestError(f"no depth is called {depth!r}", hint=f"choose one of {', '.join(DEPTHS)}")
    if depth == "logits" and tokens is None:
        raise RequestError("the logits depth needs text or tokens", hint="give some of your own with --data FILE")
    store = open_store(out)
    stored, texts = read_format(store.config)
    if stored is None:
        raise CheckpointError("; ".join(texts), where=str(out), hint="is this the exported folder?")
    place = _device(device)
    # what training ran with, whatever the export was made with
    trained = freeze(checkpoint)
    report = ParityReport(
        depth=depth,
        reference="the training-time FP8 forward"
        if trained.inputs
        else "the high-precision forward: nothing was learned",
        device=place,
        kernel="torch reference",
        data="" if depth == "weights" else data_name or "inputs drawn at the learned amax",
        tolerances={"output_error": OUTPUT_TOLERANCE, "kl_over_floor": FLOOR_FACTOR},
    )
    notify = on_progress or (lambda *_: None)
    linears, unpaired = pair_linears(checkpoint, store, stored)
    report.faults += [
        *texts,
        *unpaired,
        *judge_plain(checkpoint, store, set(linears)),
        *judge_config(checkpoint, store),
    ]
    total, done = sum(source.weight.numel for source, _ in linears.values()), 0
    with _workers() as pool:
        judgements = [
            pool.submit(judge_weight, source, export, scales, checkpoint, stored) for source, export in linears.values()
        ]
        for judgement, (source, _) in zip(judgements, linears.values(), strict=True):
            notify(done, total, source.name)
            linear = judgement.result()
            _compare_with_training(linear, scales, trained)
            report.linears.append(linear)
            if "differs" in (linear.exactness, linear.input_scale):
                report.faults.append(f"{linear.name}: {linear.why}")
            done += source.weight.numel
    if depth == "weights":
        return report

    forwards = (
        Forwards(checkpoint, trained, {n: e for n, (_, e) in linears.items()}, store, place)
        if tokens is not None
        else None
    )
    captured = forwards.capture(tokens) if forwards is not None and tokens is not None else {}
    for linear in report.linears:
        notify(0, 0, linear.name)
        source, export = linears[linear.name]
        inputs = captured.get(linear.name)
        judge_output(linear, source, export, trained, draw_inputs(source, trained) if inputs is None else inputs, place)
        fault = outside_tolerance(linear)
        if fault:
            report.faults.append(f"{linear.name}: {fault}")
    if depth == "logits" and forwards is not None and tokens is not None:
        report.logits = judge_logits(forwards, tokens)
        exact = all(linear.exactness == linear.input_scale == "exact" for linear in report.linears)
        whole = len(report.linears) == len(checkpoint.linears)
        report.faults += logits_faults(report.logits, learned=bool(trained.inputs), exact=exact and whole)
    return report
