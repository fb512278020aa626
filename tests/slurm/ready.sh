#!/usr/bin/env bash
# Install SLURM where that is a package away. Exit code 77: it cannot be had here, and one line says why.
set -euo pipefail
command -v slurmctld slurmd munged >/dev/null && exit 0
if [ "$(id -u)" != 0 ]; then echo "test-slurm skipped: SLURM is not installed, and installing it needs root"; exit 77; fi
if ! command -v apt-get >/dev/null; then echo "test-slurm skipped: SLURM is not installed, and there is no apt-get"; exit 77; fi
echo "installing slurmctld, slurmd, slurm-client and munge"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; } >/dev/null 2>&1; then
  echo "test-slurm skipped: apt-get could not install slurmctld, slurmd, slurm-client and munge"
  exit 77
fi
