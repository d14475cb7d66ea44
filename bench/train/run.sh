#!/bin/sh
# bench/train/run.sh DATA OUT SECONDS: train all four models at the same time on one GPU, into OUT/NAME.tar (4-bit folders).
# qwen3_5_moe learns slowest: SLOWEST=SECONDS gives it more time.
set -u
cd "$(dirname "$0")/../.." || exit 1
data=$1 out=$2 seconds=$3
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
made=$(mktemp -d)
one() {
    python3 -m bench.train.train "$1" --seconds "$2" --data "$data" --out "$made/$1" --device "${DEVICE:-cuda}" ${OPTIONS:-} >"$out/$1.log" 2>&1 || return 1
    mkdir -p "$made/4bit"
    python3 -m auraflux convert "$made/$1" "$made/4bit/$1" --bits 4 --group 64 >>"$out/$1.log" 2>&1 || return 1
    tar -C "$made/4bit" -cf "$out/$1.tar" "$1"
}
running=
for shape in ${SHAPES:-qwen3_moe qwen3_5_moe gpt_oss deepseek_v3}; do
    length=$seconds
    test "$shape" = qwen3_5_moe && length=${SLOWEST:-$seconds}
    one "$shape" "$length" &
    running="$running $!"
done
status=0
for each in $running; do wait "$each" || status=1; done
for log in "$out"/*.log; do echo "== $log"; head -n 2 "$log"; tail -n 8 "$log" | cut -c 1-900; done
ls -l "$out"
exit $status
