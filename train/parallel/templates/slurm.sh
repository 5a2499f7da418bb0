#!/bin/bash
# {{ describe }}
# Submit with: sbatch {{ name }}.sbatch
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ machines }}
#SBATCH --ntasks-per-node=1
? if gpus
#SBATCH --gpus-per-node={{ per_machine }}
? else
#SBATCH --cpus-per-task={{ per_machine }}
? endif
? if run_dir
#SBATCH --time=24:00:00 # what your partition allows; a longer run continues after each requeue
# SIGTERM to the steps {{ grace }} s before the time is over: the run saves, and the job goes back into
# the queue
#SBATCH --signal=TERM@{{ grace }}
? else
#SBATCH --time=24:00:00 # what your partition allows; submitted again it continues
? endif
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
{{ environment }}
? if run_dir
events={{ events }}
begun=$(date +%s)
? endif
FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FIRST_MACHINE
? if gpus
srun --kill-on-bad-exit=1 bash -c {{ quoted }}
? else
# srun asks for its cores itself (Slurm 22.05), and would give all processes of a machine one
srun --kill-on-bad-exit=1 --cpus-per-task={{ per_machine }} bash -c {{ quoted }}
? endif
code=$?
? if run_dir
# stopped by this job with everything saved: the same command continues
if [ -e "$events" ] && [ "$(stat -c %Y "$events")" -ge "$begun" ] &&
    tail -n 1 "$events" | grep -q '"event": "stopped"'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
? endif
exit "$code"
