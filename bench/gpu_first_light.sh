#!/usr/bin/env bash
# First light on a CUDA machine with two GPUs: vLLM on GPU 0, the trainer on GPU 1. Run from the repository's root, in a
# Python that has torch for CUDA, megatron-core and vLLM; logs go to $OUT (default out/gpu).
#   gpu_first_light.sh [check] [demo] [faults]
set -uo pipefail
out=${OUT:-out/gpu}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
export TANDEM_TRAINER_DEVICES=1 TANDEM_INFERENCE_DEVICES=0 TANDEM_TEST_DEVICE=cuda
for part in "$@"; do
    case $part in
        check)
            CUDA_VISIBLE_DEVICES=1 timeout 300 python3 bench/model_gpu_check.py >"$out/model_check.txt" 2>&1
            echo "check: exit $?"; tail -n 30 "$out/model_check.txt" ;;
        demo)
            timeout 330 python3 examples/demo.py --device cuda --out /tmp/demo >"$out/demo.txt" 2>&1
            echo "demo: exit $?"; tail -n 45 "$out/demo.txt"
            cp /tmp/demo/report.json /tmp/demo/reward.png "$out/"
            tar -C /tmp/demo/spool -czf "$out/demo_logs.tgz" up.log jobs logs ;;
        faults)
            timeout 560 python3 -m pytest -q -x -p no:cacheprovider --basetemp=/tmp/faults --durations=30 tests/stack/test_stack.py >"$out/faults.txt" 2>&1
            echo "faults: exit $?"; tail -n 60 "$out/faults.txt"
            tar -C /tmp/faults -czf "$out/faults_logs.tgz" --exclude=models --exclude=checkpoints . ;;
    esac
    nvidia-smi --query-gpu=index,memory.used --format=csv
done
