"""A SLURM of one node with four fake GPUs, for as long as the tests of this folder run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Sockets and devices lie there, so it is short and on a local disk.
FOLDER = Path("/tmp/kvstudy-slurm")


@pytest.fixture(scope="session")
def slurm() -> Iterator[list[str]]:
    """Snakemake's arguments for it. KVSTUDY_SLURM=dbd: with accounting (needs slurmdbd and mariadb-server)."""
    if os.getuid() != 0 or not all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged")):
        pytest.skip("needs root, slurmctld, slurmd and munge: `make test-slurm` installs them")
    accounting = os.environ.get("KVSTUDY_SLURM") == "dbd"
    # Its daemons keep what they are given as output open, which would hold a pipe open for ever.
    with (FOLDER.parent / "kvstudy-slurm.log").open("w+") as log:
        up = [str(HERE / "up.sh"), str(FOLDER), "4", *(["dbd"] if accounting else [])]
        code = subprocess.run(up, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode
        log.seek(0)
        if code == 77:
            pytest.skip(log.read())
        if code:
            pytest.fail(log.read())
    quick = ["--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "3"]
    without = ["--slurm-status-command", "squeue", "--slurm-no-account"]
    yield [*(["--default-resources", "slurm_account=test"] if accounting else without), *quick]
    subprocess.run([str(HERE / "down.sh"), str(FOLDER)], check=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
