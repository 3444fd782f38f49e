"""Layout -> folder. The only file that writes weights: streaming, atomic, resumable.

Everything happens in `OUT.partial`; nothing there has a config.json until the very end, so no server loads it. A
finished file is renamed from `NAME.partial` and gets a receipt: the layout's fingerprint and what its jobs reported. A
run that finds a receipt of its own fingerprint keeps the file. At last the folder is renamed to OUT.
"""

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .errors import Fp8ExportError, OutputError
from .layout import Layout, OutFile, Record

Progress = Callable[[int, int, str], None]
_RECEIPT = ".receipt.json"
_LOCK = ".lock"


def write(layout: Layout, out: Path, on_progress: Progress | None = None) -> list[Record]:
    """Write and publish. Returns what the jobs reported, in file order.

    Raises OutputError when OUT exists, another run holds it, or the disk refuses; nothing is published then. After an
    OutputError the finished files stay for the next try; after an error in the source all of them are removed.
    """
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        raise OutputError("the destination exists", where=str(out), hint="remove it, or choose another with -o")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial):
            records = _fill(layout, partial, on_progress or (lambda *_: None))
            _publish(partial, out)
        return records
    except OSError as error:
        raise OutputError(
            f"cannot write: {error.strerror or error}",
            where=str(error.filename or partial),
            hint="free some space or check permissions, then run the same command: finished files are kept",
        ) from error
    except OutputError:
        raise
    except Fp8ExportError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fill(layout: Layout, partial: Path, on_progress: Progress) -> list[Record]:
    done: dict[str, list[Record]] = {}
    for file in layout.files:
        records = _receipt(partial, file, layout.fingerprint)
        if records is not None:
            done[file.name] = records
    for path in partial.iterdir():  # leftovers of another layout or a torn write
        if path.name.removesuffix(_RECEIPT) not in done and path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    total = sum(file.nbytes for file in layout.files)
    written = sum(file.nbytes for file in layout.files if file.name in done)
    _check_space(partial, layout.nbytes - written)
    for file in layout.files:
        if file.name not in done:
            done[file.name] = _write_file(partial, file, layout.fingerprint, written, total, on_progress)
            written += file.nbytes
    on_progress(total, total, "")
    for name, source in layout.copies.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        _sync(target)
    records = [record for file in layout.files for record in done[file.name]]
    for name, content in layout.finish(records).items():
        write_small(partial / name, content)
    return records


def _write_file(
    partial: Path, file: OutFile, fingerprint: str, before: int, total: int, on_progress: Progress
) -> list[Record]:
    header, offsets = file.header()
    entries = {entry.name: entry for entry in file.entries}
    temporary = partial / f"{file.name}.partial"
    records: list[Record] = []
    try:
        with open(temporary, "wb", buffering=0) as handle:
            _reserve(handle.fileno(), file.nbytes)
            _write_at(handle, header, 0)

            def sink(name: str, row: int, rows: Tensor) -> None:
                entry = entries[name]
                raw = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
                _write_at(handle, raw.data, offsets[name] + row * entry.row_bytes)

            position = before
            for job in file.jobs:
                on_progress(position, total, job.entries[0].name)
                records += job.run(sink)
                position += job.nbytes
            os.fsync(handle.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, partial / file.name)
    write_small(partial / (file.name + _RECEIPT), json.dumps({"fingerprint": fingerprint, "records": records}).encode())
    return records


def _receipt(partial: Path, file: OutFile, fingerprint: str) -> list[Record] | None:
    try:
        content = json.loads((partial / (file.name + _RECEIPT)).read_bytes())
        fits = content["fingerprint"] == fingerprint and (partial / file.name).stat().st_size == file.nbytes
        records: list[Record] = content["records"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return records if fits else None


def _publish(partial: Path, out: Path) -> None:
    for path in partial.glob(f"*{_RECEIPT}"):
        path.unlink()
    (partial / _LOCK).unlink(missing_ok=True)
    _sync(partial)
    os.rename(partial, out)
    _sync(out.parent)


def write_small(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def _write_at(handle: io.FileIO, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    handle.seek(offset)
    while len(view):
        view = view[handle.write(view) or 0 :]


def _reserve(descriptor: int, size: int) -> None:
    """Claim the space now, so that a full disk shows before the work and not after it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(descriptor, size)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free",
            where=str(folder),
            hint="free some space or choose another place with -o",
        )


def _sync(path: Path) -> None:
    if sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Two runs into one folder would tear each other's files. The lock dies with its process."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(partial / _LOCK, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                "another run is writing here", where=str(partial), hint="wait for it, or choose another -o"
            ) from error
        yield
