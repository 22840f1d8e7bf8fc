"""Reads base weights from safetensors files onto the device.

`safetensors_reader.py` reads files. `base_weights.py` cuts the tensors according to
`families/weight_rules.py`. Ranks that need the same weights each read a share, and copy the other
shares from one another's GPUs (`base_memory.py`). If GPUs can't access one another's memory, each
rank reads everything.
"""
