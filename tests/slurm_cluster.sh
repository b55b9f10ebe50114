#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, for tests: munged, slurmctld and slurmd, by loopback, without accounting.
#
#   tests/slurm_cluster.sh start DIR    keys, configuration, logs and state are in DIR; prints SLURM_CONF=…, to export
#   tests/slurm_cluster.sh stop DIR
#
# As root, with Debian's packages slurm-wlm and munge. Nothing outside of DIR is written.
set -eu

fail() { echo "slurm_cluster.sh: error: $*" >&2; exit 1; }
[ $# -eq 2 ] || { echo "usage: slurm_cluster.sh start|stop DIR" >&2; exit 2; }

stop() {
  local name pid
  timeout 5 scancel --user=root 2>/dev/null || true # the jobs first: slurmd leaves them alive
  for name in slurmctld slurmd munged; do
    pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || continue
    for _ in {1..100}; do kill -0 "$pid" 2>/dev/null || continue 2; sleep 0.1; done
    kill -KILL "$pid" || true
  done
}

start() {
  local host port
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || fail "$program is missing; apt-get install slurm-wlm munge"
  done
  [ "$(id -u)" -eq 0 ] || fail "slurmd starts jobs as root only"
  mkdir -p "$dir/state" "$dir/spool"
  chmod 755 "$dir" # munged wants its folders to be root's alone to write
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
  host=$(hostname -s)
  port=$((20000 + $$ % 5000 * 2)) # another cluster may run here
  cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=20
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=2
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2
END
  # --force: DIR may lie where only root may go
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" 2>>"$dir/munged.log"
  slurmctld -f "$SLURM_CONF" >&2
  slurmd -f "$SLURM_CONF" >&2
  SECONDS=0
  while [ $SECONDS -lt 30 ]; do
    [ "$(timeout 5 sinfo --noheader --format=%T 2>/dev/null)" = idle ] && return
    sleep 0.1
  done
  tail -n 20 "$dir"/*.log >&2
  stop
  fail "the node is not up after 30 seconds; see the logs above"
}

mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf
case $1 in
  start)
    start
    echo "SLURM_CONF=$SLURM_CONF" ;;
  stop) stop ;;
  *) fail "$1: start or stop" ;;
esac
