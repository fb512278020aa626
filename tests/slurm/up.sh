#!/usr/bin/env bash
# Start a SLURM of one node with fake GPUs, as root and without systemd:  up.sh FOLDER [GPUS] [dbd]
# Debian and Ubuntu: apt-get install slurmctld slurmd slurm-client munge [slurmdbd mariadb-server], or ready.sh.
set -euo pipefail
folder=${1:?a folder for its configuration, state and logs}
gpus=${2:-4}
accounting=${3:-}
host=$(hostname -s)
# A job's step finds the configuration at its compiled-in place only: Snakemake's plugin drops SLURM_CONF on the way.
if [ -e /etc/slurm/slurm.conf ] && [ "$(readlink /etc/slurm/slurm.conf)" != "$folder/etc/slurm.conf" ]; then
  echo "up.sh: /etc/slurm/slurm.conf is there already: this machine has a SLURM of its own" >&2
  exit 77
fi
mkdir -p "$folder"/{etc,run,log,state,spool,dev} /etc/slurm
chmod 700 "$folder"/{state,spool}

# GPUs are character devices (copies of /dev/null): SLURM sets CUDA_VISIBLE_DEVICES for nothing less.
for i in $(seq 0 $((gpus - 1))); do
  [ -c "$folder/dev/fakegpu$i" ] || mknod "$folder/dev/fakegpu$i" c 1 3 || {
    echo "up.sh: no device may be made here (a container without CAP_MKNOD)" >&2
    exit 77
  }
done
echo "Name=gpu Type=fake File=$folder/dev/fakegpu[0-$((gpus - 1))]" >"$folder/etc/gres.conf"
storage="AccountingStorageType=accounting_storage/none"
if [ "$accounting" = dbd ]; then
  storage="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment"
fi
# config_overrides lets a small machine claim 16 CPUs; without DefMemPerCPU the first job takes all memory.
cat >"$folder/etc/slurm.conf" <<CONF
ClusterName=fake
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=512
GresTypes=gpu
MpiDefault=none
ReturnToService=2
MinJobAge=300
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
$storage
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=20000 Gres=gpu:fake:$gpus State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=ALL MaxTime=INFINITE State=UP
CONF
ln -sf "$folder/etc/slurm.conf" /etc/slurm/slurm.conf
ln -sf "$folder/etc/gres.conf" /etc/slurm/gres.conf

if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
  install -d -o munge -g munge -m 755 /run/munge
  runuser -u munge -- /usr/sbin/munged
  touch "$folder/run/munge-is-ours"
  for _ in $(seq 20); do munge -n 2>/dev/null | unmunge >/dev/null 2>&1 && break; sleep 0.25; done
fi

if [ "$accounting" = dbd ]; then
  if [ ! -d "$folder/db/mysql" ]; then
    install -d -o mysql -g mysql "$folder/db"
    mariadb-install-db --user=mysql --datadir="$folder/db" --auth-root-authentication-method=socket --skip-test-db >"$folder/log/mariadb.log" 2>&1
  fi
  setsid mariadbd --no-defaults --user=mysql --datadir="$folder/db" --socket="$folder/db/mysql.sock" \
    --pid-file="$folder/db/mysql.pid" --skip-networking --innodb-lock-wait-timeout=900 >>"$folder/log/mariadb.log" 2>&1 </dev/null &
  database() { mariadb -S "$folder/db/mysql.sock" -e "$1"; }
  for _ in $(seq 40); do database 'select 1' >/dev/null 2>&1 && break; sleep 0.5; done
  database "create database if not exists slurm_acct_db;
    create user if not exists slurm@localhost identified by 'slurm';
    grant all on slurm_acct_db.* to slurm@localhost;"
  mkdir -p /run/mysqld
  ln -sf "$folder/db/mysql.sock" /run/mysqld/mysqld.sock
  printf '%s\n' AuthType=auth/munge DbdHost=localhost SlurmUser=root "LogFile=$folder/log/slurmdbd.log" \
    "PidFile=$folder/run/slurmdbd.pid" StorageType=accounting_storage/mysql StorageHost=localhost StorageUser=slurm \
    StoragePass=slurm StorageLoc=slurm_acct_db >"$folder/etc/slurmdbd.conf"
  chmod 600 "$folder/etc/slurmdbd.conf"
  ln -sf "$folder/etc/slurmdbd.conf" /etc/slurm/slurmdbd.conf
  slurmdbd
  for _ in $(seq 40); do sacctmgr -n list cluster >/dev/null 2>&1 && break; sleep 0.5; done
  sacctmgr -iQ add cluster fake >/dev/null || true
  sacctmgr -iQ add account test >/dev/null || true
  sacctmgr -iQ add user "$(id -un)" account=test >/dev/null || true
fi

slurmctld -c
sleep 0.5
slurmd
for _ in $(seq 40); do [ "$(sinfo -h -p gpu -o %T 2>/dev/null)" = idle ] && break; sleep 0.25; done
sinfo -N -o '%N %P %T %c %m %G'
