#!/bin/sh
# One model on several ranks, started by torchrun: deploy/torchrun.sh MODEL [--port 8000 ...]
# On one machine as it is. On several, run it on each with NODES=2 and the address of the first: MEET=10.0.0.1:29500.
# WAY is one way for all ranks, or several that are combined, with their numbers: PER_NODE=4 WAY=pipeline=2,experts=2.
# Ranks trust everybody on their network, and torchrun's meeting place listens on all of it: use one that only they are on.
set -eu
: "${WAY:=pipeline}" "${NODES:=1}" "${PER_NODE:=2}" "${MEET:=127.0.0.1:0}" "${PYTHON:=python3}" "${COMMAND:=serve}"
case $WAY in *=*) ;; *) WAY=$WAY=$((NODES * PER_NODE)) ;; esac
model=$1
shift
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$MEET" --max-restarts 3 \
    -m auraflux "$COMMAND" "$model" --parallel "$WAY" "$@"
