#!/usr/bin/env bash
# sbatch configs/launch/slurm.sh configs/quickstart.yaml mesh.data=2 mesh.seq=8 data.batch=2 [key.path=value ...]
#
# GPUs of several hosts, one process for each GPU, as jax expects it under SLURM. The product of the mesh axes is
# nodes x GPUs of a node. run.dir must be on a file system that all nodes share.
#SBATCH --job-name=ringjax
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

# SIGTERM comes 300 s before the end of the time: the run saves and stops with status 75, and goes on when requeued.
srun .venv/bin/ringjax train "$@" run.platform=gpu processes.detect=true || status=$?
if [[ ${status:-0} -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "${status:-0}"
