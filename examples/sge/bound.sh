#!/bin/sh
# qsub bound.sh: a GPU and one core
#$ -S /bin/sh
#$ -cwd
#$ -j y
#$ -N bound
#$ -l gpu=1
#$ -binding linear:1
exec python use_gpus.py
