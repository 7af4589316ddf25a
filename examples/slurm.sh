#!/bin/bash
# Trains one network, and goes on after the end of its time, a preemption or the loss of a node:
#
#   sbatch examples/slurm.sh NAME --config=configs/imagenet.py:bf16 --config.data.dir=/data/imagenet
#
# NAME is the directory of the run below $RUNS (default runs); the other arguments go to mixedres.main. A requeued job has
# the same NAME, so it continues the run. $RUNS and the virtual environment $VENV (default .venv) must be on a file system
# that all hosts share: RUNS=/shared/runs VENV=/shared/venv sbatch examples/slurm.sh NAME ... Start the script in the
# checkout, and edit the first lines for your cluster. Arguments of sbatch before the script have precedence, such as
# --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 for one GPU.
#SBATCH --job-name=mixedres
#SBATCH --partition=gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@300
# USR1 comes 300 s before the end of the time. The run must finish a step, or an evaluation, and save within them.
set -eu

name=$1
shift
# module load cuda, or whatever else your cluster needs, comes here
source "${VENV:-.venv}/bin/activate"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch since SLURM 22.05
if [ "$SLURM_NTASKS" -gt 1 ]; then set -- "$@" --distributed; fi

# SLURM signals the processes of srun. This shell waits for them, and passes on a USR1 that it alone gets (B:USR1@300).
trap ':' TERM
trap 'kill -USR1 "$step"' USR1
trap 'kill -USR2 "$step"' USR2
srun --kill-on-bad-exit=0 python -m mixedres.main --workdir="${RUNS:-runs}/$name" \
    --config.data.threads="$SLURM_CPUS_PER_TASK" "$@" &
step=$!
wait "$step" && status=0 || status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step" && status=0 || status=$?; done

# 138 and 140: USR1 and USR2, the time was nearly up. SLURM itself requeues after a preemption (143), where the partition
# allows this, and after the loss of a node.
if [ "$status" -eq 138 ] || [ "$status" -eq 140 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
