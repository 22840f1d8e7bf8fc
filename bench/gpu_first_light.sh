#!/usr/bin/env bash
# The demo, the trainer's tests and the model's checks on a CUDA machine. Run from the repository's root, in a Python that
# has torch for CUDA, megatron-core and vLLM; logs go to $OUT (default out/gpu).
set -uo pipefail
out=${OUT:-out/gpu}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,memory.used,memory.total --format=csv
python3 -c 'import torch, vllm, megatron.core as m; print("torch", torch.__version__, "vllm", vllm.__version__, "megatron-core", m.__version__)'
timeout 120 python3 bench/model_gpu_check.py 2>&1 | tee "$out/model_check.txt" | tail -40
TANDEM_VERIFY_TOLERANCE=0.05 timeout 330 python3 examples/demo.py --device cuda --out /tmp/demo >"$out/demo.txt" 2>&1
echo "demo: exit $?"
tail -n 40 "$out/demo.txt"
cp /tmp/demo/report.json /tmp/demo/reward.png "$out/" 2>/dev/null
tar -C /tmp/demo/spool -czf "$out/logs.tgz" $(cd /tmp/demo/spool && ls -d up.log logs jobs/logs jobs/events jobs/succeeded jobs/failed jobs/running 2>/dev/null)
nvidia-smi --query-gpu=memory.used --format=csv
OMP_NUM_THREADS=2 timeout 120 python3 -m pytest -q -p no:cacheprovider -n 6 -m "not slow and not gpu" tests/model tests/trainer_ranks >"$out/pytest.txt" 2>&1
echo "pytest: exit $?"
tail -n 15 "$out/pytest.txt"
