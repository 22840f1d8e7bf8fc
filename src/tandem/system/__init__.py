"""The host: processes, ports, files, GPUs and logs. It knows nothing of jobs.

`processes.py` ends process trees. By `die_with_parent` every process of the trainer dies with its
parent, so `kill -9` of the runner leaves no rank behind. `plain_files.py` opens files that other
programs wrote: regular files only, through no link. `safetensors_header.py` is the only reader and
writer of that header. `nvml.py` asks the driver about GPUs; `gpus.py` knows which GPUs belong to
the trainer or vLLM, and whether they are free. `api_keys.py` knows the names of keys.
`http_limits.py` bounds what peers of uvicorn may send, for controller and vLLM. `network.py` knows
this machine's addresses.
"""
