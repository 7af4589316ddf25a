#!/bin/bash
# Trains the runs of a sweep with one task of an array for each seed; the tasks share a directory:
#
#   sbatch --array=0-4 examples/slurm_sweep.sh experiments/sweeps/precision.py
#
# Each task takes the runs with its seed, one after the other. The report is made at the end, or in between:
#
#   python -m experiments.report runs/sweeps/precision
#SBATCH --job-name=sweep
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -eu

sweep=$1
shift
source "${VENV:-.venv}/bin/activate"

# The shell alone gets USR1 and passes it on: the sweep stops its run, which saves, and the requeued task goes on.
trap ':' TERM
warned=
trap 'warned=1; kill -USR1 "$driver"' USR1
python -m experiments.sweep --sweep="$sweep" --only="seed=$SLURM_ARRAY_TASK_ID(,|\$)" \
    "$@" --config.data.threads="$SLURM_CPUS_PER_TASK" &
driver=$!
wait "$driver" && status=0 || status=$?
while kill -0 "$driver" 2>/dev/null; do wait "$driver" && status=0 || status=$?; done

# The driver of a sweep ends with 130 after every signal that asks it to stop; scancel and preemptions send TERM.
if [ "$status" -eq 130 ] && [ -n "$warned" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
