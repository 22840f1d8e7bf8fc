#!/usr/bin/env bash
# The benchmarks of one H200 each, side by side on four, in parts of less than ten minutes. Run from the repository's
# root, in a Python that has torch for CUDA, megatron-core and vLLM; what they print goes to $OUT (default out/gpu).
#   on_four_gpus.sh cycles     bench.shared on GPU 0; bench.restart, twenty jobs in each way, on 1 to 3
#   on_four_gpus.sh faults     bench.shared_faults; the tests marked gpu come first on GPU 0
#   on_four_gpus.sh starts     bench.restart: one GPU alone; then two tensor-parallel beside two data-parallel ranks
#   on_four_gpus.sh experts    a mixture of experts: served adapters on 0, kernels on 1, starts on 2 and 3
#   on_four_gpus.sh metrics    a scrape of each exporter while a job runs, on 0 and 1
set -uo pipefail
# As in the images, where everything is compiled: otherwise each process compiles torch and Megatron again.
unset PYTHONDONTWRITEBYTECODE
out=${OUT:-out/gpu} work=${WORK:-/tmp/tandem-bench}
mkdir -p "$out" "$work"
export PYTHONPATH="src:.:tests${PYTHONPATH:+:$PYTHONPATH}"

into() {  # NAME SECONDS COMMAND...: its output to $out/NAME.txt, the end of it here
    local name=$1 seconds=$2
    shift 2
    OUT="$work/$name" timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
    echo "rc $?" >>"$out/$name.txt"
    echo "== $name"; tail -n 12 "$out/$name.txt" | cut -c1-400
}

model() {  # DIRECTORY...: one model of 16 GB in all of them
    [ -d "$work/model" ] || python3 -c 'from pathlib import Path; from bench.restart import make_model; import sys
make_model(Path(sys.argv[1]), "qwen3-8b", "cuda")' "$work/model"
    for directory; do
        mkdir -p "$directory/qwen3-8b"
        ln -sf "$work"/model/* "$directory/qwen3-8b/"
    done
}

tests() {  # FILE...: each in a process of its own, since one wants an idle GPU
    for file; do
        into "$(basename "$file" .py)" 150 python3 -m pytest -q -p no:cacheprovider -m gpu "$file"
    done
}

restart() {  # NAME ARGUMENT...
    local name=$1
    shift
    into "$name" 300 python3 -m bench.restart --out "$work/$name" "$@"
}

faults() {  # GPU VICTIM PHASE...
    local gpu=$1 victim=$2
    shift 2
    into "faults.$victim.$gpu" 570 python3 -m bench.shared_faults --device "$gpu" --victims "$victim" --phases "$@" --seconds 440
}

case ${1:-} in
    cycles)
        model "$work/shared" "$work/restart"
        into shared 560 python3 -m bench.shared --work "$work/shared" --out "$work/shared.logs" &
        into restart 560 python3 -m bench.restart --jobs 20 --side-by-side --seconds 470 --gpus 1 2 3 --out "$work/restart" &
        ;;
    faults)
        {
            CUDA_VISIBLE_DEVICES=0 tests tests/trainer_ranks/test_offload_gpu.py tests/trainer_ranks/test_memory_gpu.py \
                tests/model/test_experts.py tests/model/test_recompute_leak.py
            faults 0 rank loading stepping checkpoint
        } &
        faults 1 runner sleeping starting loading stepping checkpoint releasing waking &
        faults 2 vllm sleeping loading stepping &
        faults 3 vllm checkpoint waking &
        ;;
    starts)
        model "$work/one" "$work/tensor" "$work/data"
        into imports 120 bash -c 'for what in "import torch.distributed.run" "from tandem.trainer import worker; worker.preload()"; do
            for _ in 1 2; do time python3 -c "$what"; done
        done; python3 -m compileall -q -l "$(python3 -c "import torch; print(torch.__path__[0])")" && echo torch can be compiled'
        restart one
        restart tensor --ranks 2 --tensor-parallel 2 --gpus 0 1 &
        restart data --ranks 2 --gpus 2 3 &
        ;;
    experts)
        CUDA_VISIBLE_DEVICES=0 tests tests/inference/test_served_experts.py &
        CUDA_VISIBLE_DEVICES=1 into kernels 300 python3 -m bench.model_gpu_check --experts --speed &
        restart experts --shape qwen3-30b-a3b-8l --ways fork resident --side-by-side --gpus 2 3 &
        ;;
    metrics)
        into metrics 300 python3 -m bench.gpu_metrics --out "$out/scrapes"
        ;;
    *) sed -n 2,8p "$0"; exit 2 ;;
esac
wait
nvidia-smi --query-gpu=index,memory.used --format=csv
