#!/bin/sh
# bench/train/run.sh DATA OUT SECONDS: train all four models at the same time on one GPU.
#   OUT/models.tar  4-bit models in the layout of bench/trained: tar -xf models.tar -C bench/trained
#   OUT/bf16.tar    the same models before quantization, for bench.train.check
#   OUT/NAME.log    progress, held-out loss, measurements
# SECONDS is training time. A model that takes SPARE (default 50) more, for start and measurements, is stopped.
# qwen3_5_moe learns slowest: SLOWEST=SECONDS gives it more time. DEVICE=cpu OPTIONS='--steps 2 --tokens 512 --longest 512'
# tries the whole path without a GPU.
set -u
cd "$(dirname "$0")/../.." || exit 1
data=$1 out=$2 seconds=$3
shapes=${SHAPES:-qwen3_moe qwen3_5_moe gpt_oss deepseek_v3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
made=$(mktemp -d)
mkdir -p "$out" "$made/bf16" "$made/4bit/blobs" "$made/4bit/snapshots"

one() {
    name=$1 length=$2 folder=$made/4bit/snapshots/$1 status=0
    timeout -k 5 "$((length + ${SPARE:-50}))" python3 -m bench.train.train "$name" --seconds "$length" --data "$data" \
        --out "$made/bf16/$name" --device "${DEVICE:-cuda}" ${OPTIONS:-} || status=1
    # weights are written before they are measured
    test -f "$made/bf16/$name/model.safetensors" || return 1
    timeout -k 5 40 python3 -m auraflux convert "$made/bf16/$name" "$folder" --bits 4 --group-size 64 || return 1
    # one file of weights needs no index
    rm -f "$folder/model.safetensors.index.json"
    for file in generation_config.json tokenizer.json tokenizer_config.json; do
        cp "$folder/$file" "$made/4bit/blobs/$file.$name" && mv "$made/4bit/blobs/$file.$name" "$made/4bit/blobs/$file"
        ln -sf "../../blobs/$file" "$folder/$file"
    done
    return $status
}

running=
for shape in $shapes; do
    length=$seconds
    test "$shape" = qwen3_5_moe && length=${SLOWEST:-$seconds}
    one "$shape" "$length" >"$out/$shape.log" 2>&1 &
    running="$running $!"
done
(while sleep 15 >/dev/null; do for shape in $shapes; do echo "$shape: $(tail -n 1 "$out/$shape.log" | cut -c 1-200)"; done; done) &
progress=$!
status=0
for each in $running; do wait "$each" || status=1; done
kill $progress
tar -C "$made/4bit" -cf "$out/models.tar" blobs snapshots
tar -C "$made" -cf "$out/bf16.tar" bf16
for shape in $shapes; do echo "== $shape"; tail -n 6 "$out/$shape.log" | cut -c 1-1200; done
ls -l "$out" "$made"/4bit/snapshots/*/model.safetensors
rm -r "$made"
exit $status
