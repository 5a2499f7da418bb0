#!/bin/bash
# Tokenisation by {{ elements }} elements of {{ cores }} processes, on a file system that all of them see.
# Submit with: sbatch {{ name }}.sbatch
# Each element makes the same plan from the sizes of the inputs; element i takes shards i, i + {{ elements }}, i +
# {{ 2 * elements }} ... The one that commits the last shard completes the store, so that no job depends on
# another. Submitted again, it does what is left.
#SBATCH --job-name={{ name }}
#SBATCH --array=0-{{ elements - 1 }}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={{ cores }}
#SBATCH --time=24:00:00
# SIGTERM a minute before the time is over: finished shards are kept, and the element goes back into the queue
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" throughline {{ command }}
code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"; fi
exit "$code"
