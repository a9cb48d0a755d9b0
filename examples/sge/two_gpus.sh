#!/bin/sh
# qsub two_gpus.sh
#$ -S /bin/sh
#$ -cwd
#$ -j y
#$ -N two_gpus
#$ -l gpu=2
exec python use_gpus.py
