#!/bin/sh
# Compares one inference server with two servers behind one address, on two GPUs. Measures the
# answers per second and the prefix-cache hit rates. Usage:
# `bench/replicas.sh MODEL [CONVERSATIONS IN FLIGHT PER SERVER]`. The script needs haproxy and
# tandem-rl[gpu]. Each stack is a `tandem up --role inference` with its own spool. The client
# bench.rollouts samples step 0 of a run of this spool.
set -eu
model=$1 flight=${2:-512}
command -v haproxy >/dev/null || { echo "haproxy is not installed: apt-get install haproxy" >&2; exit 2; }
directory=$(mktemp -d)
python -c "import sys; from tandem.spool import Spool; [Spool.create(r) for r in sys.argv[1:]]" "$directory/1" "$directory/2"
for servers in 1 2; do
    devices=0
    [ $servers = 1 ] || devices=0,1
    export TANDEM_ROOT=$directory/$servers TANDEM_BASE_MODEL=$model TANDEM_API_KEY=bench
    python -m tandem.controller >"$directory/controller.log" 2>&1 &
    up=$!
    trap 'kill $up 2>/dev/null; wait' EXIT
    until python -m tandem run create speed >/dev/null 2>&1; do
        kill -0 $up || { tail -50 "$directory/controller.log" >&2; exit 1; }
        sleep 1
    done
    kill $up
    wait $up || true
    TANDEM_INFERENCE_DEVICES=$devices TANDEM_INFERENCE_REPLICAS=$servers python -m tandem up --role inference >"$directory/$servers.log" 2>&1 &
    up=$!
    until curl -sf -H 'Authorization: Bearer bench' http://127.0.0.1:8000/v1/models | grep -q speed@0; do
        kill -0 $up || { tail -50 "$directory/$servers.log" >&2; exit 1; }
        sleep 2
    done
    # If only one server were ready, it would answer all requests, so the script waits for both.
    if [ $servers = 2 ]; then
        until grep -l '"ready":true' "$directory"/2/replicas/*.json 2>/dev/null | wc -l | grep -qx 2; do sleep 2; done
    fi
    echo "servers: $servers"
    python -m bench.rollouts http://127.0.0.1:8000 --model speed@0 --in-flight $((flight * servers)) --answers 2 --turns 3 --tokens 128 --repeat 1
    ports=8000
    [ $servers = 1 ] || ports="8001 8002"
    for port in $ports; do
        curl -s "http://127.0.0.1:$port/metrics" | grep -E '^vllm:prefix_cache_(hits|queries)_total' | sed "s/^/$port /"
    done
    kill $up
    wait $up || true
done
