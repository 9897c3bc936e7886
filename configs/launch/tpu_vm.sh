#!/usr/bin/env bash
# configs/launch/tpu_vm.sh TPU_NAME ZONE configs/quickstart.yaml mesh.seq=32 [key.path=value ...]
#
# Runs one process on each host of a Cloud TPU slice; jax finds them. The product of the mesh axes is the number of
# chips. The checkout with its .venv (installed with the extra tpu) is in ~/ringjax on every host, and run.dir on
# storage that all hosts share.
set -euo pipefail

if (($# < 3)); then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
tpu=$1 zone=$2
shift 2
printf -v arguments '%q ' "$@"
gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
  --command="cd ringjax && .venv/bin/ringjax train ${arguments}run.platform=tpu processes.detect=true"
