#!/usr/bin/env bash
# Benchmarks for a machine with two or four H200s, which run for about 25 minutes. Start them from the repository's root,
# with a Python that has torch for CUDA, megatron-core and vLLM.
#   on_gpus.sh start [PART...]  starts these parts in a separate session, from a copy of the tree; the shell may exit
#   on_gpus.sh wait SECONDS     waits until the parts have ended, at most SECONDS; then packs the results as $OUT/gpu.tgz
#   on_gpus.sh run [PART...]    runs these parts in this shell
# If no part is named, these parts run: imports shared memory one tensor data experts.
# These parts measure merged weights, and run only if they are named: swap throughput swap30 faults-merged learn faults-whole publications.
# These parts need four GPUs and run only if they are named: starts4 swap4 learn4 ranks4 groups4 small plan4 plan4-large (the models of 60 GB).
# SHAPE=tiny DEVICE=cpu JOBS=2 tests the script without a GPU.
set -uo pipefail
# The container images contain compiled Python bytecode. With PYTHONDONTWRITEBYTECODE each process
# would compile torch's and Megatron's sources again.
unset PYTHONDONTWRITEBYTECODE
work=${WORK:-/tmp/tandem-bench}
shape=${SHAPE:-qwen3-8b} device=${DEVICE:-cuda} jobs=${JOBS:-20}
out=$work/out
mkdir -p "$out"

wants() {  # PART: whether it is to be run
    [ -z "$parts" ] || [[ " $parts " == *" $1 "* ]]
}

named() {
    [ -n "$parts" ] && wants "$1"
}

into() {  # NAME SECONDS COMMAND...: runs the command; its output goes to $out/NAME.txt, its rows go beside it
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    mkdir -p "$work/$name"
    OUT="$work/$name" timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
    echo "rc $? after $((SECONDS - begin)) s" >>"$out/$name.txt"
    mkdir -p "$out/results.$name"
    find bench/results -name '*.json' -newer "$work/begun" -exec cp -p {} "$out/results.$name" \;
    cp "$work/$name"/*.log "$work/$name"/memory*.csv "$out/results.$name" 2>/dev/null
    echo "== $name, at $SECONDS s"; tail -n 8 "$out/$name.txt" | cut -c1-300
}

model() {  # DIRECTORY: makes the model of 16 GB once, and links it into $work/DIRECTORY
    [ -d "$work/model" ] || python3 -c 'from pathlib import Path; from bench.restart import make_model; import sys
make_model(Path(sys.argv[1]), *sys.argv[2:])' "$work/model" "$shape" "$device"
    mkdir -p "$work/$1/$shape"
    ln -sf "$work"/model/* "$work/$1/$shape/"
}

tests() {  # GPU FILE...: runs each file in a process of its own, because a file's tests need an idle GPU
    local gpu=$1
    shift
    for file; do
        CUDA_VISIBLE_DEVICES=$gpu into "$(basename "$file" .py)" 200 python3 -m pytest -q -p no:cacheprovider -m gpu "$file"
    done
}

restart() {  # NAME SECONDS ARGUMENT...
    local name=$1 seconds=$2
    shift 2
    wants "$name" || return
    into "$name" "$seconds" python3 -m bench.restart --shape "$shape" --device "$device" --out "$work/$name" "$@"
}

learned() {  # NAME WAY...: yes/no/maybe by each way in which weights travel, on the GPUs that the environment names
    local name=$1 way how
    shift
    for way; do
        how="--weights merged --transport $way"
        [ "$way" = adapter ] && how=
        into "learn-$name-$way" 300 python3 examples/demo.py --model tiny --device "$device" $how --experts "${experts:-0}" \
            --controller-port "${controller:-8080}" --inference-port "${inference:-8000}" --out "$work/learn-$name-$way/demo"
        cp "$work/learn-$name-$way/demo/report.json" "$work/learn-$name-$way/demo/spool/up.log" \
            "$out/results.learn-$name-$way/" 2>/dev/null
    done
}

# vLLM starts only on a GPU that no other program uses, and a trainer's job fails if another program's memory grows
# during the job. So a part that restarts vLLM or shares a GPU runs alone on this GPU.
merged() {
    local faults="python3 -m pytest -v -s --tb=short --durations=0 -p no:cacheprovider --all-cases"
    if named swap; then
        into swap 500 python3 -m bench.swap --shape 8b --swaps 5 --many 0 --name swap-whole --out "$work/models" \
            --ways nccl-device merge-host &
        # This GPU also runs the trainer's ranks of the part `swap`. With a utilization of 0.68, vLLM leaves room for
        # these ranks. A second vLLM could not start on a GPU that these ranks use.
        into swap-merge 500 python3 -m bench.swap --shape 8b --swaps 5 --gpus 1 --utilization 0.68 --many 0 \
            --name swap-merge --out "$work/models-1" --ways merge-device &
        wait
    fi
    named throughput && into throughput 400 python3 -m bench.swap --shape 8b --swaps 5 --name throughput \
        --out "$work/models" --ways merge-device adapter
    named swap30 && into swap30 900 python3 -m bench.swap --shape 30b-a3b --swaps 4 --many 0 --utilization 0.92 \
        --out "$work/models" --ways merge-auto nccl-auto
    named faults-merged && TANDEM_TEST_GPU=0 into faults-merged 600 $faults tests/inference/test_merged_faults.py &
    # Trainer and vLLM share one GPU.
    named learn && experts=4 controller=8081 inference=8001 CUDA_VISIBLE_DEVICES=1 learned 1 adapter merge volume
    wait
    named faults-whole && TANDEM_TEST_GPU=0 into faults-whole 600 $faults tests/inference/test_whole_vllm.py
    named publications && into publications 600 python3 -m bench.swap --shape 0.6b --name publications --ways merge-device \
        --enforce-eager --utilization 0.2 --requests 8 --many 0 --swaps 2 --warm 2 --publications 500
}

# On four GPUs, vLLM has the first two and the trainer has the other two, or the trainer has all
# four.
four() {
    if named starts4; then
        local ranks=(--ways fork --jobs 4 --shape "$shape" --device "$device")
        for part in start1 start-tp2 start-dp2; do model "$part"; done
        into start1 150 python3 -m bench.restart "${ranks[@]}" --gpus 2 --out "$work/start1"
        into start-tp2 150 python3 -m bench.restart "${ranks[@]}" --ranks 2 --tensor-parallel 2 --gpus 2 3 --out "$work/start-tp2"
        into start-dp2 150 python3 -m bench.restart "${ranks[@]}" --ranks 2 --gpus 2 3 --out "$work/start-dp2"
    fi
    named swap4 && into swap4 300 python3 -m bench.swap --shape 8b --swaps 5 --many 0 --gpus 0 1 --trainer-gpus 2 3 \
        --ways nccl-device --name swap-8b-2x2 --out "$work/models"
    if named learn4; then
        export TANDEM_TRAINER_RANKS=2 TANDEM_INFERENCE_TENSOR_PARALLEL=2
        [ "$device" = cuda ] && export TANDEM_INFERENCE_DEVICES=0,1 TANDEM_TRAINER_DEVICES=2,3
        TANDEM_TENSOR_PARALLEL=2 learned tp2 adapter merge nccl
        learned dp2 adapter nccl
        unset ${!TANDEM_TRAINER_*} ${!TANDEM_INFERENCE_*}
    fi
    named ranks4 && into ranks4 200 python3 -m bench.many_ranks --device "$device" --out "$work/ranks4"
    named ranks4 && into ranks4-tp2 200 python3 -m bench.many_ranks --device "$device" --tensor-parallel 2 --out "$work/ranks4-tp2"
    named groups4 && into groups4 400 python3 -m bench.topologies --jobs 1 --name topologies-groups --out "$work/models" \
        --cases groups-{dp2,tp2,cp2,tp2-sp,pp2,tp2-dp2,cp2-dp2,tp2-sp-cp2,tp2-pp2,ep2,ep4,ep2-dp2}
    named small && into small 150 python3 -m bench.train --model qwen3-0.6b --rows 8192 1024 --ways auto --profile --name train-small
    local plan="python3 -m bench.topologies --recommended 4 --jobs 1 --out $work/models"
    named plan4 && into plan4 590 $plan --name topologies-4 --cases plan-0.6b-8k plan-0.6b-full-8k plan-8b-8k plan-8b-full-8k \
        plan-8b-32k plan-8b-full-32k plan-8b-tree plan-8b-full-tree
    named plan4-large && into plan4-large 590 $plan --name topologies-4-large --cases plan-30b-a3b-8k plan-30b-a3b-full-8k \
        plan-30b-a3b-full-32k plan-30b-a3b-tree plan-32b-8k plan-32b-full-8k
}

run() {
    touch "$work/begun"
    # vLLM finds Tandem's plugin by package metadata. Tandem is not always installed, so this function writes the
    # metadata.
    local metadata=$work/site/tandem_rl-0.1.0.dist-info
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: tandem-rl\nVersion: 0.1.0\n' >"$metadata/METADATA"
    printf '[vllm.general_plugins]\ntandem = tandem.inference.server.plugin:register\n' >"$metadata/entry_points.txt"
    export PYTHONPATH="$PWD/src:$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
    merged
    four
    # Each import runs twice. The first import writes bytecode, so only the second import takes as long as in a job.
    wants imports && into imports 120 bash -c 'for what in "import torch.distributed.run" "from tandem.trainer.rank import entry; entry.preload('cuda')"; do
        for _ in 1 2; do time python3 -c "$what"; done
    done' &
    for part in shared one tensor data; do wants "$part" && model "$part"; done
    wait
    wants shared && into shared 600 python3 -m bench.shared --shape "$shape" --work "$work/shared" --out "$work/shared"
    # The part `one` runs alone on the machine, because the ranks of other parts would also use disk
    # and memory bandwidth.
    restart one 720 --jobs "$jobs" --seconds 650
    restart data 300 --ranks 2 --jobs 4
    wants memory && tests 0 tests/rank/test_memory_gpu.py tests/training/test_offload_gpu.py &
    wants experts && tests 1 tests/inference/test_experts_on_a_gpu.py tests/model/test_experts.py \
        tests/model/test_gpu_like_cpu.py tests/model/test_recompute.py tests/model/test_checkpoint_tensors.py &
    wait
    restart tensor 300 --ranks 2 --tensor-parallel 2 --jobs 4
    nvidia-smi --query-gpu=index,memory.used --format=csv
    touch "$work/ended"
}

what=${1:-}
parts=${*:2}
case $what in
    start)
        mkdir "$work/tree"
        tar -c --exclude=.git --exclude=.venv --exclude=.gpu . | tar -x -C "$work/tree"
        cd "$work/tree" && setsid bash bench/on_gpus.sh run $parts >"$out/all.txt" 2>&1 </dev/null &
        ;;
    wait)
        end=$((SECONDS + ${2:?seconds}))
        while [ ! -e "$work/ended" ] && [ $SECONDS -lt $end ]; do sleep 1; done
        cat "$out/all.txt"
        tar -C "$work" -czf "${OUT:-.}/gpu.tgz" out
        ;;
    run) run ;;
    *) sed -n 2,8p "$0"; exit 2 ;;
esac
