#!/bin/sh
# qsub array.sh: four tasks, each with a GPU that no other has
#$ -S /bin/sh
#$ -cwd
#$ -j y
#$ -N array
#$ -t 1-4
#$ -l gpu=1
exec python use_gpus.py "${SECONDS_OF_TRAINING:-10}"
