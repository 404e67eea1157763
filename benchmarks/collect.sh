#!/usr/bin/env bash
# Everything that is measured on a GPU, in steps that each leave their raw results in a folder:
#
#     bash benchmarks/collect.sh FOLDER [tests indexer mla recordings captured pairs start verify emulate gpus]
#
# A step that fails or runs out of time does not keep the others from running. Searches and recordings go on from where
# an earlier run in the same folder stopped. In a clone, with dsv4tune and the peers installed (`dsv4tune doctor`).
set -u
cd "$(dirname "$0")/.." || exit
out=$(realpath -m "${1:?usage: collect.sh FOLDER [STEP...]}")
shift
mkdir -p "$out"
dsv4tune=(python -m dsv4tune.tools.cli)

# step NAME SECONDS COMMAND...: stdout to NAME, the rest to NAME.log
step() {
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    timeout -s INT -k 20 "$limit" "$@" >"$out/$name" 2>"$out/$name.log" || status=$?
    echo "$name: status $status, $((SECONDS - started)) s"
    [ "$status" = 0 ] || tail -n 3 "$out/$name.log"
}

tests() { step tests.txt 600 python -m pytest -m gpu -q -rs; }

indexer() {
    step search_indexer.json 300 "${dsv4tune[@]}" search --kernel indexer --rows 1,16,64,512,4096 --db "$out/indexer.db" --json
    step indexer.json 400 "${dsv4tune[@]}" bench --kernel indexer --db "$out/indexer.db" --json
    step width.json 120 python benchmarks/width_cost.py "$out/indexer.db"
}

mla() {
    for heads in 8 16 32 64; do
        for cache in c4 c128 none; do
            step "search_mla_${heads}_$cache.json" 120 "${dsv4tune[@]}" search --kernel mla_decode --heads $heads --cache $cache \
                --rows 1,4,16,64,128,256 --effort quick --db "$out/mla.db" --json
        done
    done
    step mla_decode.json 500 "${dsv4tune[@]}" bench --kernel mla_decode --db "$out/mla.db" --json
}

recordings() {
    for rows in 64 1 16; do
        step "record_indexer_$rows.txt" 200 "${dsv4tune[@]}" record --kernel indexer --rows $rows -o "$out/indexer_r$rows.jsonl.gz"
    done
    for problem in 8:1 64:64 8:64; do
        local heads=${problem%:*} rows=${problem#*:}
        step "record_mla_${heads}_$rows.txt" 200 "${dsv4tune[@]}" record --kernel mla_decode --heads "$heads" \
            --rows "$rows" -o "$out/mla_decode_h${heads}_r$rows.jsonl.gz"
    done
}

captured() {
    step captured.json 900 "${dsv4tune[@]}" search --kernel indexer --rows captured --effort quick --db "$out/captured.db" --json
    for heads in 8 16 32 64; do
        for cache in c4 c128 none; do
            step "captured_mla_${heads}_$cache.json" 400 "${dsv4tune[@]}" search --kernel mla_decode --heads $heads --cache $cache \
                --rows captured --effort quick --trials 12 --db "$out/captured.db" --json
        done
    done
    step captured_mla_pro.json 400 "${dsv4tune[@]}" search --kernel mla_decode --model pro --heads 16 --cache c4 \
        --rows captured --effort quick --trials 12 --db "$out/captured.db" --json
}

# Repeated searches agree: the same problem on two fresh databases, with other seeds.
pairs() {
    for kernel in indexer mla_decode; do
        for seed in 0 1; do
            step "pair_${kernel}_$seed.json" 200 "${dsv4tune[@]}" search --kernel "$kernel" --rows 64 --seed "$seed" \
                --db "$out/pair_${kernel}_$seed.db" --json
        done
    done
}

start() { step start_time.json 200 python benchmarks/start_time.py; }

verify() {
    for file in tuned/configs/h200/*.json; do
        step "verify_$(basename "$file" .json).txt" 300 "${dsv4tune[@]}" verify "$file" --db "$out/verify.db"
    done
}

emulate() {
    for kernel in indexer mla_decode; do
        step "emulated_$kernel.json" 300 "${dsv4tune[@]}" emulate --target sm_120 --kernel $kernel --keep "$out/emulated.db" --json
    done
}

gpus() { step two_gpus.json 300 python benchmarks/two_gpus.py --trials 200; }

[ $# -gt 0 ] || set -- tests indexer mla recordings captured pairs start verify emulate gpus
for name in "$@"; do
    "$name"
done
