"""Where files lie, and how they are written: beside, then renamed, so that each is whole or absent.

    results/
      plan/<study>/plan.json, plan/cells/<cell>.json, plan/visits/...   what is to be done
      models/<model>/  workloads/<workload>/  environments/<framework>/ what cells are made from
      store/<cell>/                                                      what was measured, never rewritten
  quality/<cell>/                                                    parts of quality cells under way
      <study>/visits/  figures/  tables/  report.pdf  report.html        a view of it

Nothing here imports Hydra, torch or MLflow: jobs must start fast.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

#: Files of a cell's folder (DESIGN, "Cells, visits and the store").
CONFIG = "config.yaml"
REQUESTS = "requests.parquet"
MEMORY = "memory.parquet"
SUMMARY = "summary.json"
PROVENANCE = "provenance.json"
LOG = "log.txt"
#: Of a quality cell: every item's values, and what was measured of them (columns in `records.QUALITY_COLUMNS`).
ITEMS = "items.parquet"
MEASURES = "measures.parquet"
CELL_FILES = (CONFIG, REQUESTS, MEMORY, SUMMARY, PROVENANCE, LOG)

#: How the name of what is half written ends; the machine is in it, because locks may not reach another one.
HALF = f".{hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]}.half"


@dataclass(frozen=True)
class Layout:
    """Paths under one results folder."""

    root: Path

    def plan(self, study: str) -> Path:
        """The plan of a study: its cells, visits and what was left out."""
        return self.root / "plan" / study / "plan.json"

    def visit(self, study: str, visit_id: str) -> Path:
        """A visit's resolved description, the job's input."""
        return self.root / "plan" / study / "visits" / f"{visit_id}.json"

    def model(self, model_id: str) -> Path:
        """Folder of a prepared model (Hugging Face layout and model.json)."""
        return self.root / "models" / model_id

    def skew(self, model_id: str) -> Path:
        """InfiniGen's skewing matrices of a model, made once."""
        return self.root / "models" / f"{model_id}.skew.safetensors"

    def converted(self, model_id: str) -> Path:
        """A model in the format of the authors' forks; the file of the same name and .json says that it is whole."""
        return self.root / "models" / f"{model_id}.flexgen"

    def workload(self, workload_id: str) -> Path:
        """Folder of a drawn workload."""
        return self.root / "workloads" / workload_id

    def environment(self, key: str) -> Path:
        """Folder of a framework's environment; its freeze file is `freeze.txt` there."""
        return self.root / "environments" / key

    def cell(self, cell_id: str) -> Path:
        """Folder of a measured cell."""
        return self.root / "store" / cell_id

    def study(self, study: str) -> Path:
        """Folder of a study's view: markers, figures, tables, report."""
        return self.root / study

    def marker(self, study: str, visit_id: str) -> Path:
        """The file that says a visit is done: the output of Snakemake's measuring rule."""
        return self.root / study / "visits" / f"{visit_id}.json"

    def quality_visit(self, study: str, visit_id: str) -> Path:
        """The resolved description of cells whose quality is scored together, the job's input."""
        return self.root / "plan" / study / "quality" / f"{visit_id}.json"

    def quality_marker(self, study: str, visit_id: str) -> Path:
        """The file that says that a quality visit is done."""
        return self.root / study / "quality" / f"{visit_id}.json"

    def quality_part(self, cell_id: str, part: str) -> Path:
        """Rows of a part of a quality cell that is not whole yet, so that nothing scored is lost."""
        return self.root / "quality" / cell_id / f"{part}.parquet"

    @property
    def lock(self) -> Path:
        """Locked by whoever fills this folder: one workflow at a time."""
        return self.root / ".lock"

    def state(self, study: str, visit_id: str) -> Path:
        """What a visit that is not done is doing: `measure.state`."""
        return self.root / study / "running" / f"{visit_id}.json"

    def tracking(self, study: str) -> Path:
        """Which MLflow run holds which cell: written when MLflow agrees with the store."""
        return self.root / "tracking" / f"{study}.json"


def is_whole(cell_dir: Path) -> bool:
    """Whether a cell was measured. The folder is renamed into place, so existing means whole."""
    return (cell_dir / SUMMARY).is_file()


def write_text(path: Path, text: str) -> bool:
    """Write `text` whole or not at all; leave a file that already says so untouched.

    Returns whether the file was written. Snakemake compares modification times, so an unchanged file
    must keep its own.
    """
    try:
        if path.read_bytes() == text.encode():
            return False
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    with _writing(path.parent):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=HALF, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return True


def write_json(path: Path, value: Any) -> bool:
    """`write_text` of indented JSON with keys in the given order. NaN is refused: NA is null."""
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends, or vanishes when it fails.

    Raises
    ------
    FileExistsError
        `target` is there already: what was measured is never overwritten.
    """
    if target.exists():
        raise FileExistsError(f"{target} is already there; nothing measured is ever overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _writing(target.parent):
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=HALF, dir=target.parent))
        try:
            yield staging
            os.chmod(staging, 0o755)
            # A power cut after the rename must not find a whole folder of empty files, nor forget the rename.
            for path in (*staging.iterdir(), staging):
                _sync(path)
            os.rename(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Hold off `sweep` while something half written lies in the folder. The kernel lets go for those who are killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks, where sweep does nothing
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def sweep(folder: Path) -> int:
    """Remove what killed writers left half written in a folder; nothing while anybody writes. Returns how much."""
    found = list(folder.glob(f".*{HALF}"))
    if not found:
        return 0
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    else:
        for path in found:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(found)
    finally:
        os.close(handle)


def hold(path: Path, who: str) -> IO[str] | str:
    """Hold a lock file for as long as the answer is kept; or answer, in one line, who holds it.

    The kernel lets go when the process ends, however it ends, so that nothing need be unlocked by hand.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        with handle:
            other = handle.read().strip() or "another process"
        return f"{other} is at work on {path.parent}: wait until it has ended, or stop it"
    except OSError:  # a file system without locks
        return handle
    handle.truncate(0)
    handle.write(f"{who} (pid {os.getpid()} on {os.uname().nodename})\n")
    handle.flush()
    return handle


def cannot_write(error: OSError, folder: Path) -> str:
    """An error of the operating system in one line that says what to do about it."""
    # pyarrow says what it was, and not where: the number is in the text alone.
    number = error.errno or next((code for code in errno.errorcode if f"[errno {code}]" in str(error).lower()), None)
    where = error.filename or folder
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
        free = shutil.disk_usage(there).free / 2**20
        why = "a file may not grow so large (ulimit -f)" if number == errno.EFBIG else "the disk is full"
        return f"{why} ({where}, {free:.0f} MiB free): make room and run again"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write {where} ({os.strerror(number)}): make it writable or name another folder"
    return f"{' '.join(str(error.strerror or error).split())}: {where}"


def read_summary(cell_dir: Path) -> dict[str, Any]:
    """The summary of a measured cell."""
    with (cell_dir / SUMMARY).open(encoding="utf-8") as handle:
        summary: dict[str, Any] = json.load(handle)
    return summary
