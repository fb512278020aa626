#!/usr/bin/env bash
# Stop what up.sh started, and take its configuration away again:  down.sh FOLDER
folder=${1:?the folder that up.sh was given}
[ "$(readlink /etc/slurm/slurm.conf)" = "$folder/etc/slurm.conf" ] || exit 0
scancel -u "$(id -un)" >/dev/null 2>&1
stop() { [ -f "$1" ] && kill "$(cat "$1")" 2>/dev/null; }
stop "$folder/run/slurmd.pid"
stop "$folder/run/slurmctld.pid"
for _ in $(seq 40); do [ -e "$folder/run/slurmctld.pid" ] || [ -e "$folder/run/slurmd.pid" ] || break; sleep 0.25; done
stop "$folder/run/slurmdbd.pid"
for _ in $(seq 40); do [ -e "$folder/run/slurmdbd.pid" ] || break; sleep 0.25; done
if stop "$folder/db/mysql.pid"; then
  for _ in $(seq 40); do [ -e "$folder/db/mysql.pid" ] || break; sleep 0.25; done
  rm -f /run/mysqld/mysqld.sock
fi
if [ -f "$folder/run/munge-is-ours" ]; then stop /run/munge/munged.pid; rm -f "$folder/run/munge-is-ours"; fi
rm -f /etc/slurm/slurm.conf /etc/slurm/gres.conf /etc/slurm/slurmdbd.conf
exit 0
