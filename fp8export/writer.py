"""Layout -> folder. The only file that writes weights: streaming, atomic, resumable.

Everything happens in `OUT.fp8export-partial`, which has no config.json until the very end, so no server loads it. A
finished file is renamed from `NAME.partial` and gets a receipt: the layout's resume key and what its jobs reported. A
run that finds a receipt of its own keeps the file. At last the folder is renamed to OUT.
"""

import contextlib
import errno
import io
import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial as partial_call
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError, Fp8ExportError, OutputError
from .layout import Layout, OutFile, Record

Progress = Callable[[int, int, str], None]
_ADVICE = {number: "free some space" for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
_RECEIPT = ".receipt.json"
PARTIAL = ".fp8export-partial"  # nobody else's folder is called so: what lies in it may be removed


def write(layout: Layout, out: Path, on_progress: Progress | None = None) -> list[Record]:
    """Write and publish. Returns what the jobs reported, in file order.

    Raises OutputError when OUT exists, another run holds it, or the disk refuses; nothing is published then. After an
    OutputError the finished files stay for the next try; after an error in the source all of them are removed.
    """
    partial = out.with_name(out.name + PARTIAL)
    if partial.is_symlink():
        raise OutputError("the working folder is a link", where=str(partial), hint="remove the link")
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
            hint=_ADVICE.get(error.errno or 0, "check the path and its permissions")
            + ", then run the same command: finished files are kept",
        ) from error
    except OutputError:
        raise
    except Fp8ExportError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fill(layout: Layout, partial: Path, on_progress: Progress) -> list[Record]:
    done: dict[str, list[Record]] = {}
    for file in layout.files:
        records = _receipt(partial, file, layout.resume_key)
        if records is not None:
            done[file.name] = records
    for path in partial.iterdir():  # leftovers of another layout or a torn write
        if path.name.removesuffix(_RECEIPT) not in done:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    total = sum(file.nbytes for file in layout.files)
    written = sum(file.nbytes for file in layout.files if file.name in done)
    _check_space(partial, layout.nbytes - written)
    with _Background() as background:
        for file in layout.files:
            if file.name not in done:
                done[file.name] = _stream(partial, file, layout.resume_key, background, written, total, on_progress)
                written += file.nbytes
    on_progress(total, total, "")
    for name, source in layout.copies.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not source.is_file():
            raise CheckpointError("a file vanished while it was to be copied", where=str(source), hint="try again")
        shutil.copyfile(source, target)
        _sync(target)
    records = [record for file in layout.files for record in done[file.name]]
    for file in layout.files:
        (partial / (file.name + _RECEIPT)).unlink()
    for name, content in layout.finish(records).items():
        write_small(partial / name, content)
    return records


def _stream(
    partial: Path,
    file: OutFile,
    resume_key: str,
    background: "_Background",
    before: int,
    total: int,
    on_progress: Progress,
) -> list[Record]:
    """Compute the file's rows here while the background writes the rows before, and finishes the file before."""
    header, offsets = file.header()
    entries = {entry.name: entry for entry in file.entries}
    temporary = partial / f"{file.name}.partial"
    handle = open(temporary, "wb", buffering=0)  # noqa: SIM115 - closed in the background, after the last row
    background.closes(handle)
    _reserve(handle.fileno(), file.nbytes)
    background.put(partial_call(_write_at, handle, header, 0))

    def sink(name: str, row: int, rows: Tensor) -> None:
        entry = entries[name]
        raw = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
        background.put(partial_call(_write_at, handle, raw.data, offsets[name] + row * entry.row_bytes))

    records: list[Record] = []
    position = before
    for job in file.jobs:
        on_progress(position, total, job.entries[0].name)
        records += job.run(sink)
        position += job.nbytes

    def finish() -> None:
        os.fsync(handle.fileno())
        handle.close()
        os.replace(temporary, partial / file.name)
        receipt = {"resume_key": resume_key, "records": records}
        write_small(partial / (file.name + _RECEIPT), json.dumps(receipt).encode())

    background.put(finish)
    return records


class _Background:
    """One thread that runs what it is given, in order. Its first error surfaces at the next `put` or at the end."""

    _WAITING = 4  # pieces of a few MB: enough to keep both sides busy

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(self._WAITING)
        self._error: BaseException | None = None
        self._stopped = False
        self._handles: list[io.FileIO] = []
        self._thread = threading.Thread(target=self._run, name="fp8export-writer", daemon=True)

    def closes(self, handle: io.FileIO) -> None:
        self._handles.append(handle)

    def put(self, task: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._error is None and not self._stopped:
                try:
                    task()
                except BaseException as error:  # handed to the caller's thread
                    self._error = error

    def __enter__(self) -> "_Background":
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stopped = kind is not None
        self._tasks.put(None)
        self._thread.join()
        failed = kind is not None or self._error is not None
        for handle in self._handles:
            if not handle.closed:
                handle.close()
                if failed:  # a torn file only takes space
                    Path(str(handle.name)).unlink(missing_ok=True)
        if kind is None and self._error is not None:
            raise self._error


def _receipt(partial: Path, file: OutFile, resume_key: str) -> list[Record] | None:
    try:
        content = json.loads((partial / (file.name + _RECEIPT)).read_bytes())
        fits = content["resume_key"] == resume_key and (partial / file.name).stat().st_size == file.nbytes
        records: list[Record] = content["records"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return records if fits else None


def _publish(partial: Path, out: Path) -> None:
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
    if hasattr(os, "posix_fadvise"):
        # Linux takes this as "start writing these pages out": the final sync then has little left to wait for
        os.posix_fadvise(handle.fileno(), offset, len(data), os.POSIX_FADV_DONTNEED)


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
            f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free",
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
    """Two runs into one folder would tear each other's files. The lock is on the folder itself, so that it follows the
    rename to OUT, and dies with its process."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(descriptor), os.stat(partial))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:  # held by another run, or published by it between our look and our lock
            raise OutputError(
                "another run is writing here", where=str(partial), hint="wait for it, or choose another -o"
            )
        yield
    finally:
        os.close(descriptor)
