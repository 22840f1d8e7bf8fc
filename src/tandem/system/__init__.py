"""Code for the host's processes, ports, files, GPUs and logs. The package has no code about jobs.

`processes.py` ends process trees. With `die_with_parent`, every process of the trainer dies with
its parent, so `kill -9` of the runner leaves no rank behind. `plain_files.py` opens files that
other programs wrote. `plain_files.py` refuses a path that contains a link or is not a regular file.
`safetensors_header.py` is the only reader and writer of the header of safetensors files. `nvml.py`
asks the driver about GPUs; `gpus.py` finds the GPUs of the trainer or vLLM, and checks whether
these GPUs are free. `api_keys.py` finds the names of API keys. `http_limits.py` limits the headers
and the waiting times of HTTP requests, for controller and vLLM. `network.py` finds this machine's
addresses.
"""
