"""Five commands: parse, call, print, exit code. The only file that prints; torch loads inside the commands."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import Fp8ExportError, OutputError, ParityError, RequestError, ScaleError, VerifyError

if TYPE_CHECKING:
    from torch import Tensor

    from .model import Checkpoint, ScaleSet
    from .report import ParityReport

_PATH = click.Path(path_type=Path)
_from = click.option("--from", "source_name", metavar="SOURCE", help="Name the source when several fit.")
_hf_config = click.option("--hf-config", type=_PATH, metavar="DIR", help="Folder with config.json and tokenizer files.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_data = click.option(
    "--data", type=_PATH, metavar="FILE", help="Your own text, .jsonl, or token ids in .npy/.safetensors."
)
_keep = click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Leave these layers in high precision; repeatable."
)
_scales = click.option(
    "--scales",
    default="learned",
    show_default=True,
    metavar="POLICY|FILE",
    help="learned, history-max, most-recent, dynamic, or a scales.json.",
)
_samples = click.option("--samples", default=4, show_default=True, type=click.IntRange(1), help="Sequences of --data.")
_length = click.option(
    "--seq-len", default=256, show_default=True, type=click.IntRange(2), help="Tokens in a sequence."
)


class _Commands(click.Group):
    """Expected failures become a message and their exit code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Fp8ExportError as error:
            click.echo(f"fp8export: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fp8export")
def main() -> None:
    """Freeze the scales that FP8 training learned and hand them to serving engines, with proof.

    Exit codes: 0 done, 2 usage, 3 the result is not good enough, 4 unreadable checkpoint or unusable scales,
    5 the target cannot express it, 6 cannot write, 7 refused an unsafe pickle.
    """


@main.command("inspect")
@click.argument("ckpt", type=_PATH)
@_from
@_hf_config
@click.option("--headers-only", is_flag=True, help="Do not read weights; stale weight scales stay unseen.")
@_json
def inspect_command(
    ckpt: Path, source_name: str | None, hf_config: Path | None, headers_only: bool, as_json: bool
) -> None:
    """Say what a checkpoint is, what its training learned, and whether that can be trusted."""
    from . import console
    from .health import examine
    from .report import to_json
    from .sources import read_checkpoint, recognise
    from .store import open_store

    store = open_store(ckpt, hf_config)
    name, reason = recognise(store, source_name)
    checkpoint = read_checkpoint(store, name)
    with _progress("reading weights", disabled=headers_only) as notify:
        findings = examine(checkpoint, weights=not headers_only, on_progress=notify)
    if as_json:
        _print(to_json(console.inspection_data(checkpoint, reason, store.container, findings)))
    else:
        _print(console.inspection(checkpoint, reason, store.container, findings))


@main.command("freeze")
@click.argument("ckpt", type=_PATH)
@click.option("-o", "--out", type=_PATH, required=True, metavar="FILE", help="Where scales.json goes.")
@click.option("--policy", default="learned", show_default=True, help="learned, history-max or most-recent.")
@_from
@_keep
@_json
def freeze_command(
    ckpt: Path, out: Path, policy: str, source_name: str | None, keep: tuple[str, ...], as_json: bool
) -> None:
    """Write the static scales of a checkpoint as a file to read, compare and edit."""
    from . import console
    from .calibrate import freeze, save_scales
    from .plan import kept_layers
    from .road import inspect

    checkpoint = inspect(ckpt, source_name=source_name)
    scales = freeze(checkpoint, policy)
    kept, _ = kept_layers(checkpoint, keep)
    left = {name: why for name, why in scales.missing.items() if name not in kept}
    if left:
        raise ScaleError(
            f"{len(left)} layers have no usable scale: {next(iter(left.values()))}",
            where=", ".join(list(left)[:5]),
            hint="--keep PATTERN leaves them out",
        )
    text = save_scales(scales, without=kept)
    _write_scales(out, text)
    count = len(checkpoint.linears) - len(kept)
    _print(text.decode() if as_json else f"input and weight scales of {count} layers in {out}")
    for note in console.notes(note for note in scales.notes if note.where not in kept):
        _tell(note)


@main.command("convert")
@click.argument("ckpt", type=_PATH)
@click.option("-o", "--out", type=_PATH, metavar="DIR", help="Destination; default is CKPT-fp8.")
@click.option("--to", default="compressed-tensors", show_default=True, help="Target format.")
@_from
@_scales
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "tensor", "channel"]),
    help="Scale granularity. auto loses nothing; tensor unifies q/k/v and gate/up by maximum.",
)
@_keep
@click.option("--strict", is_flag=True, help="Refuse to recompute or unify a learned scale.")
@click.option("--shard-size", default="5GB", show_default=True, help="Largest output file, as 500MB or 5GB.")
@_hf_config
@click.option(
    "--parity",
    "depth",
    default="weights",
    show_default=True,
    type=click.Choice(["off", "weights", "linears", "logits"]),
    help="How far to judge the result.",
)
@_data
@_samples
@_length
@click.option("--dry-run", is_flag=True, help="Print the layout, sizes and reasons; write nothing.")
@_json
def convert_command(
    ckpt: Path,
    out: Path | None,
    to: str,
    source_name: str | None,
    scales: str,
    weights: str,
    keep: tuple[str, ...],
    strict: bool,
    shard_size: str,
    hf_config: Path | None,
    depth: str,
    data: Path | None,
    samples: int,
    seq_len: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert a trained checkpoint to a folder that a server loads, then verify and judge it."""
    if depth == "logits" and data is None:
        raise RequestError("--parity logits needs text or tokens", hint="give some of your own with --data FILE")
    from . import console
    from .report import to_json
    from .road import convert, inspect
    from .targets import find_target
    from .verify import verify_folder

    tokens = None
    if data is not None and depth in ("linears", "logits"):  # before an hour of work, not after it
        checkpoint = inspect(ckpt, source_name=source_name, hf_config=hf_config)
        tokens = _tokens(data, hf_config or ckpt, checkpoint, samples, seq_len)
    with _progress("converting", disabled=dry_run) as notify:
        done = convert(
            ckpt,
            out,
            to=to,
            source_name=source_name,
            scales=scales,
            weights=weights,
            keep=keep,
            strict=strict,
            shard_size=_bytes(shard_size),
            hf_config=hf_config,
            dry_run=dry_run,
            on_progress=notify,
        )
    if dry_run:
        _print(to_json(console.layout_data(done)) if as_json else console.layout(done))
        return
    with _progress("verifying") as notify:
        verified = verify_folder(done.out, on_progress=notify)
    parity = None
    if depth != "off" and verified.passed:
        parity = _judge(done.checkpoint, done.scales, done.out, depth, tokens, data)
    serve = find_target(to).SERVE.format(path=shlex.quote(str(done.out)))
    if as_json:
        _print(to_json(console.conversion_data(done, verified, parity, serve)))
    else:
        _print(console.conversion(done, verified, parity, serve))
    _fail_on_faults(verified.passed, parity, done.out)


@main.command("verify")
@click.argument("out", type=_PATH)
@click.option("--headers-only", is_flag=True, help="Check headers and scales, do not read the codes.")
@_json
def verify_command(out: Path, headers_only: bool, as_json: bool) -> None:
    """Re-read a finished folder and fail on everything that servers would misread."""
    from . import console
    from .verify import verify_folder

    if not out.is_dir():
        raise RequestError("no such folder", where=str(out), hint="give the folder that convert wrote")
    with _progress("verifying", disabled=headers_only) as notify:
        report = verify_folder(out, codes=not headers_only, on_progress=notify)
    _print(report.to_json() if as_json else console.verification(report))
    _fail_on_faults(report.passed, None, out)


@main.command("parity")
@click.argument("ckpt", type=_PATH)
@click.argument("out", type=_PATH)
@_data
@click.option(
    "--depth",
    type=click.Choice(["weights", "linears", "logits"]),
    help="How far to judge; default logits with --data, else linears.",
)
@click.option("--scales", metavar="POLICY|FILE", help="What the export should hold; default is what it says it holds.")
@_samples
@_length
@click.option("--device", help="cpu or cuda; default is cuda when there is one.")
@_from
@_hf_config
@_json
def parity_command(
    ckpt: Path,
    out: Path,
    data: Path | None,
    depth: str | None,
    scales: str | None,
    samples: int,
    seq_len: int,
    device: str | None,
    source_name: str | None,
    hf_config: Path | None,
    as_json: bool,
) -> None:
    """Judge whether the exported numbers are the trained numbers."""
    from . import console
    from .road import claimed_scales, inspect, scales_for

    checkpoint = inspect(ckpt, source_name=source_name, hf_config=hf_config)
    chosen = scales_for(checkpoint, scales or claimed_scales(out))
    depth = depth or ("logits" if data else "linears")
    tokens = _tokens(data, out, checkpoint, samples, seq_len) if data and depth != "weights" else None
    report = _judge(checkpoint, chosen, out, depth, tokens, data, device)
    _print(report.to_json() if as_json else console.parity(report))
    _fail_on_faults(True, report, out)


def _tokens(data: Path, folder: Path, checkpoint: "Checkpoint", samples: int, length: int) -> "Tensor":
    from .parity.data import read_tokens

    vocabulary = checkpoint.config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise RequestError("config.json does not say vocab_size", hint="it is needed to read --data")
    return read_tokens(data, folder, vocabulary, samples, length)


def _judge(
    checkpoint: "Checkpoint",
    scales: "ScaleSet",
    out: Path,
    depth: str,
    tokens: "Tensor | None",
    data: Path | None,
    device: str | None = None,
) -> "ParityReport":
    from .parity import judge

    name = data.name if data else ""
    with _progress("parity") as notify:
        return judge(
            checkpoint, scales, out, depth=depth, tokens=tokens, data_name=name, device=device, on_progress=notify
        )


def _fail_on_faults(verified: bool, parity: "ParityReport | None", out: Path) -> None:
    if not verified:
        raise VerifyError(
            "servers would misread this folder, see the faults above", where=str(out), hint="do not serve it"
        )
    if parity is not None and not parity.passed:
        raise ParityError(
            "the export is not the trained model, see the faults above",
            where="; ".join(parity.faults[:3]),
            hint="do not serve it; convert again from the checkpoint",
        )


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.strip().upper()
    for unit, factor in units.items():
        if number.endswith(unit):
            try:
                size = int(float(number.removesuffix(unit)) * factor)
            except (ValueError, OverflowError):
                break
            if size > 0:
                return size
    raise RequestError(f"--shard-size {text}", hint="write a number and a unit, as 500MB or 5GB")


def _write_scales(path: Path, content: bytes) -> None:
    """Overwrite a scale file, and nothing else that somebody may need."""
    from .calibrate import load_scales
    from .writer import write_small

    try:
        if path.exists():
            load_scales(path)
        write_small(path, content)
    except ScaleError as error:
        raise OutputError(
            "the destination exists and is no scale file", where=str(path), hint="choose another -o"
        ) from error
    except OSError as error:
        raise OutputError(f"cannot write: {error.strerror}", where=str(path), hint="check the path") from error


@contextmanager
def _progress(label: str, disabled: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr when a person watches."""
    if disabled or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, name="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total or None, name=name)


def _print(what: Any) -> None:
    if isinstance(what, str):
        click.echo(what)
        return
    from rich.console import Console

    # piped output has no width of its own: wide enough for the tables, never cut
    width = None if sys.stdout.isatty() else 160
    Console(width=width, soft_wrap=True, markup=False, highlight=False, emoji=False).print(what)


def _tell(what: Any) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False).print(what)
