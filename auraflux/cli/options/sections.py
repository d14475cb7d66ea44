"""Sections of --help-all: the flags of each. A flag that no section names is in the last one."""

SECTIONS: dict[str, frozenset[str]] = {
    title: frozenset(flags.split())
    for title, flags in {
        "Prompt and output": "--prompt --chat --system --json --stats --save --plot",
        "Sampling": "--max-tokens --temperature --top-k --top-p --min-p --repetition-penalty --presence-penalty "
        "--frequency-penalty --seed --stop",
        "Network": "--host --port --name --api-key --api-key-file --no-auth --cors --allow-host --grace --deadline --log-json",
        "Load": "--url --clients --rate --prompt-tokens --shared --tokens --requests --warmup --rounds --stream --timeout "
        "--server-options",
        "Measurement": "--text --peers --ablations --window --windows --copy --needle --tools --questions --speed --fresh",
        "Random weights": "--random --shape --layers",
        "Batch and prefix cache": "--max-sequences --max-queue --target-itl --cache-memory --prefix-disk --prefix-folder",
        "Model": "--device --context --quantize --gpu-memory --graph --exact --invariant --prefill --speculate --mmproj",
        "KV cache": "--kv --kv-skip-first-layers --kv-skip-last-layers --sink-tokens --recent-window --calibrate --sparse-v",
        "Expert offloading": "--expert-memory --experts --expert-io --expert-host-memory --expert-prefetch --expert-balance "
        "--verify",
        "Several machines or GPUs": "--parallel --hosts --expert-counts --rank-timeout --restart --ray --replicas",
    }.items()
}
OTHER = "Other"
