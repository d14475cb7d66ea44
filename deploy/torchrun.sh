#!/bin/sh
# Run a model on several ranks with torchrun: deploy/torchrun.sh MODEL [--port 8000 ...]
# On several machines, run it on each with NODES=2 and the rendezvous on the first: MEET=10.0.0.1:29500.
# WAY is the parallel layout: one mode for all ranks, or a combination: PER_NODE=4 WAY=pipeline=2,experts=2.
# Use a private network: ranks trust it, and torchrun's rendezvous listens on all addresses.
set -eu
: "${WAY:=pipeline}" "${NODES:=1}" "${PER_NODE:=2}" "${MEET:=127.0.0.1:0}" "${PYTHON:=python3}" "${COMMAND:=serve}"
case $WAY in *=*) ;; *) WAY=$WAY=$((NODES * PER_NODE)) ;; esac
model=$1
shift
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$MEET" --max-restarts 3 \
    -m auraflux "$COMMAND" "$model" --parallel "$WAY" "$@"
