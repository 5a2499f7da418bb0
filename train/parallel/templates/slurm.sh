#!/bin/bash
# @describe@
# Submit with: sbatch @name@.sbatch
#SBATCH --job-name=@name@
#SBATCH --nodes=@machines@
#SBATCH --ntasks-per-node=1
?gpus #SBATCH --gpus-per-node=@per_machine@
?!gpus #SBATCH --cpus-per-task=@per_machine@
?run_dir #SBATCH --time=24:00:00 # what your partition allows; a longer run continues after each requeue
?!run_dir #SBATCH --time=24:00:00 # what your partition allows; submitted again it continues
?run_dir # SIGTERM to the steps @grace@ s before the time is over: the run saves, and the job goes back into
?run_dir # the queue
?run_dir #SBATCH --signal=TERM@@grace@
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
@environment@
?run_dir events=@events@
?run_dir begun=$(date +%s)
FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FIRST_MACHINE
?gpus srun --kill-on-bad-exit=1 bash -c @quoted@
?!gpus # srun asks for its cores itself (Slurm 22.05), and would give all processes of a machine one
?!gpus srun --kill-on-bad-exit=1 --cpus-per-task=@per_machine@ bash -c @quoted@
code=$?
?run_dir # stopped by this job with everything saved: the same command continues
?run_dir if [ -e "$events" ] && [ "$(stat -c %Y "$events")" -ge "$begun" ] &&
?run_dir     tail -n 1 "$events" | grep -q '"event": "stopped"'; then
?run_dir   scontrol requeue "$SLURM_JOB_ID"
?run_dir fi
exit "$code"
