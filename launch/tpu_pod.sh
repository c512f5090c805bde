#!/usr/bin/env bash
# Trains on a Cloud TPU VM: one host, or all hosts of a pod slice.
#
#   export TPU_NAME=my-tpu ZONE=us-west4-a NFS_SHARE=10.0.0.2:/share
#   launch/tpu_pod.sh up               # makes the VM if need be, and installs
#   launch/tpu_pod.sh train [FLAG...]  # starts distlm on all workers; follows
#   launch/tpu_pod.sh follow           # shows the log of worker 0 to its end
#   launch/tpu_pod.sh logs             # fetches the TensorBoard logs to runs/
#   launch/tpu_pod.sh stop             # ends the training after a step, saved
#   launch/tpu_pod.sh down             # deletes the VM; stop first
#
# FLAGs go to `distlm train`, such as --config.training_steps=1000. All else is
# set in the environment, see below. Each command is printed, to be pasted into
# a shell, before it is run; with --dry-run in front of the subcommand it is
# printed only. gcloud must be logged in, and for several hosts it needs
# `ssh-add ~/.ssh/google_compute_engine` first.
#
# The training does not depend on the connection: Ctrl-C, or a line that drops,
# ends `train` and `follow` alone. When one worker fails, all end, since JAX
# misses its heartbeat, and `train` again goes on from the newest checkpoint.
# The exit code of `train` and `follow` is 0 at the end of the training or after
# `stop`, 2 for what would fail again, and else 1. So this, with SPOT=true,
# lasts until the training is over, and makes a preempted VM anew:
#
#   until launch/tpu_pod.sh up && launch/tpu_pod.sh train; do
#     [ $? -eq 1 ] || break
#     sleep 60
#   done

set -euo pipefail

TPU_NAME=${TPU_NAME:-}
ZONE=${ZONE:-}
PROJECT=${PROJECT:-} # Empty: that of `gcloud config`.
# https://cloud.google.com/tpu/docs/runtimes says which go together.
ACCELERATOR_TYPE=${ACCELERATOR_TYPE:-v5litepod-16}
RUNTIME_VERSION=${RUNTIME_VERSION:-v2-alpha-tpuv5-lite}
SPOT=${SPOT:-false} # true: cheaper, and may be taken away at any time.
# HOST:/PATH of an NFS server in the VM's network, such as Filestore, which `up`
# mounts on all workers at /mnt/distlm. Empty: what WORKDIR needs is there.
NFS_SHARE=${NFS_SHARE:-}
CONFIG=${CONFIG:-experiments/tiny.py} # In this checkout, which is copied.
# On a file system that all workers mount: worker 0 saves, and all restore. A
# bucket under gcsfuse will not do: it neither renames a directory at once,
# which is what makes a checkpoint whole, nor locks a file between hosts.
WORKDIR=${WORKDIR:-/mnt/distlm/$(basename -- "$CONFIG" .py)}

MOUNT_POINT=/mnt/distlm
STOP_TIMEOUT_SECS=600 # For a step, an evaluation and a save.

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

# Ends with MESSAGE and CODE: 2 for what the user can mend, else 1.
fail() {
  printf 'error: %s\n' "$1" >&2
  exit "$2"
}

# Prints its arguments as words of a shell. Unlike `printf %q` it leaves the
# lines of a remote command readable.
quote() {
  local word separator='' mark="'" escaped="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) word="'${word//$mark/$escaped}'" ;;
    esac
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

# Prints the gcloud command of a VERB; --quiet, as nobody may be there to ask.
tpu() {
  local verb=$1
  shift
  quote gcloud compute tpus tpu-vm "$verb" "$@" "--zone=$ZONE" \
    ${PROJECT:+"--project=$PROJECT"} --quiet
}

# Prints the command that runs COMMAND on WORKERS. ssh would take the lines that
# were pasted after it for its input.
on_workers() {
  printf '%s </dev/null' \
    "$(tpu ssh "$TPU_NAME" "--worker=$1" "--command=$2")"
}

# Prints LINE, then runs it in this shell.
run() {
  printf '%s\n' "$1"
  if ! "$dry_run"; then
    eval "$1" || fail "$subcommand: the command above failed with exit code $?;\
 mend what it says and run the same again" 1
  fi
}

# A worker keeps in ~/distlm: code, venv, the log, pid and exit code of its
# training, and a lock that this holds as long as it lives. gcloud connects
# again when a line drops, so that each of these commands may run twice.

# Prints what installs the copied checkout. uv brings the Python that distlm
# needs, as the images have an older one.
install_command() {
  cat <<'EOF'
set -e
mkdir -p distlm
cd distlm
exec 9>>lock
if ! flock -n 9; then
  echo 'error: a training runs on this worker; stop it first' >&2
  exit 1
fi
rm -rf code
mkdir code
tar -xzf ../distlm.tar.gz -C code
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
~/.local/bin/uv venv --quiet --allow-existing --python 3.11 venv
~/.local/bin/uv pip install --quiet --python venv/bin/python \
  --constraint code/constraints.txt --editable code 'jax[tpu]'
EOF
  if [ -n "$NFS_SHARE" ]; then
    cat <<EOF
if ! [ -x /sbin/mount.nfs ]; then
  sudo apt-get -q update
  sudo apt-get -q -y -o DPkg::Lock::Timeout=300 install nfs-common
fi
sudo mkdir -p $MOUNT_POINT
mountpoint -q $MOUNT_POINT ||
  sudo mount -t nfs $(quote "$NFS_SHARE") $MOUNT_POINT
sudo chmod a+rwx $MOUNT_POINT
EOF
  fi
}

# Prints what starts a training with FLAGs. The group of processes gets the
# signal of `stop`, which the shell must outlive to note the exit code.
start_command() {
  local flags
  flags=$(quote "--config=$CONFIG" "--workdir=$WORKDIR" "$@")
  cat <<EOF
set -e
cd distlm/code
exec 9>>../lock
if ! flock -n 9; then
  echo 'error: a training runs on this worker; follow it, or stop it' >&2
  exit 1
fi
rm -f ../exit
setsid nohup bash -c 'trap : TERM; "\$@"; echo \$? >../exit' distlm \\
  ../venv/bin/distlm train $flags \\
  >../log 2>&1 </dev/null &
echo \$! >../pid
EOF
}

# Prints what shows the log until the training ends, and takes its exit code.
follow_command() {
  cat <<'EOF'
cd distlm || exit 1
if flock -n lock true; then
  tail -n 100 log
else
  tail -n 100 -f --pid="$(cat pid)" log
fi
exit "$(cat exit || echo 1)"
EOF
}

# Prints what ends the training, and waits until it has.
stop_command() {
  cat <<EOF
set -e
cd distlm
exec 9>>lock
if flock -n 9; then
  echo 'no training runs on this worker'
  exit
fi
kill -TERM -- "-\$(cat pid)"
if ! flock -w $STOP_TIMEOUT_SECS 9; then
  echo 'error: the training has not ended in $STOP_TIMEOUT_SECS s' >&2
  exit 1
fi
tail -n 3 log
# 143: it was still starting, with nothing to save.
code=\$(cat exit)
[ "\$code" = 143 ] || exit "\$code"
EOF
}

up() {
  local archive=runs/$TPU_NAME.tar.gz create
  create=(create "$TPU_NAME" "--accelerator-type=$ACCELERATOR_TYPE"
    "--version=$RUNTIME_VERSION")
  if [ "$SPOT" = true ]; then create+=(--spot); fi
  # An error of `describe` is shown by `create` again, but for NOT_FOUND.
  run "state=\$($(tpu describe "$TPU_NAME" '--format=value(state)')) || state="
  # A VM in these states cannot be started again; all that it had is gone.
  run "case \$state in PREEMPTED | TERMINATED)\
 $(tpu delete "$TPU_NAME") ;; esac"
  run "[ \"\$state\" = READY ] || $(tpu "${create[@]}")"
  run "mkdir -p runs && tar -czf $(quote "$archive") --exclude='./.*'\
 --exclude=./runs --exclude=./build --exclude=__pycache__ ."
  run "$(tpu scp "$archive" "$TPU_NAME:distlm.tar.gz" --worker=all)"
  run "$(on_workers all "$(install_command)")"
}

train() {
  run "$(on_workers all "$(start_command "$@")")"
  follow
}

follow() {
  local line code=0
  line=$(on_workers 0 "$(follow_command)")
  printf '%s\n' "$line"
  if "$dry_run"; then return; fi
  trap 'detach' INT
  eval "$line" || code=$?
  case $code in
    0) ;;
    2) fail "$subcommand: distlm refused its flags or their input, as its log\
 above says; mend them" 2 ;;
    *) fail "$subcommand: worker 0 ended with exit code $code; the cause may be\
 in ~/distlm/log of another worker; train again to go on from the newest\
 checkpoint" 1 ;;
  esac
}

detach() {
  printf '\nThe training goes on. To see or to end it: %s follow, %s stop\n' \
    "$0" "$0" >&2
  exit 130
}

logs() {
  local directory
  directory=runs/$TPU_NAME/$(basename "$WORKDIR")
  # The run may write while it is read: tar's exit code is then 1.
  run "mkdir -p $(quote "$directory") && $(on_workers 0 \
    "tar -C $(quote "$WORKDIR") --warning=no-file-changed -czf - \
tensorboard metrics.jsonl || [ \$? -eq 1 ]") |\
 tar -xzf - -C $(quote "$directory")"
  printf '# tensorboard --logdir %s\n' "$(quote "$directory/tensorboard")"
}

stop() {
  run "$(on_workers all "$(stop_command)")"
}

down() {
  run "$(tpu delete "$TPU_NAME")"
}

check_name() {
  if ! [[ $2 =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]]; then
    fail "$1=$2: it must be lower-case letters, digits and hyphens; set it,\
 such as in: $1=$3 $0 $subcommand" 2
  fi
}

check_config() {
  case $CONFIG in
    /*) fail "CONFIG=$CONFIG: it must be a path in this checkout, which the\
 workers get a copy of; put the file there" 2 ;;
  esac
  if ! [ -f "$CONFIG" ]; then
    fail "CONFIG=$CONFIG: there is no such file in $PWD; name one of it" 2
  fi
}

check_settings() {
  check_name TPU_NAME "$TPU_NAME" my-tpu
  check_name ZONE "$ZONE" us-west4-a
  case $SPOT in
    true | false) ;;
    *) fail "SPOT=$SPOT: it must be true or false; set it to one of them" 2 ;;
  esac
  case $NFS_SHARE in
    '' | [[:alnum:]]*:/*) ;;
    *) fail "NFS_SHARE=$NFS_SHARE: it must be HOST:/PATH, such as\
 10.0.0.2:/share; set it so, or to nothing" 2 ;;
  esac
  case $WORKDIR in
    /*) ;;
    *) fail "WORKDIR=$WORKDIR: it must be an absolute path on a file system\
 that all workers mount; set NFS_SHARE and a path under $MOUNT_POINT" 2 ;;
  esac
  if [ "$subcommand" = train ]; then check_config; fi
  if ! "$dry_run" && ! command -v gcloud >/dev/null; then
    fail "PATH=$PATH: gcloud is not there; install it from\
 https://cloud.google.com/sdk/docs/install, or use --dry-run" 2
  fi
}

main() {
  dry_run=false
  if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
  fi
  subcommand=${1:-}
  case $subcommand in
    -h | --help) usage && exit ;;
    -*) fail "$subcommand: there is no such flag; see $0 --help" 2 ;;
    up | train | follow | logs | stop | down) shift ;;
    *) fail "COMMAND=$subcommand: it must be up, train, follow, logs, stop or\
 down; see $0 --help" 2 ;;
  esac
  case " $* " in
    *" --dry-run "*) fail "--dry-run: it goes before $subcommand" 2 ;;
  esac
  if [ "$subcommand" != train ] && [ $# -gt 0 ]; then
    fail "$1: $subcommand takes nothing after it; leave it out" 2
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  check_settings
  printf 'cd %s\n' "$(quote "$PWD")"
  "$subcommand" "$@"
}

main "$@"
