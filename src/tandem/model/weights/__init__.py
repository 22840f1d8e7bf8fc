"""Reads base weights from safetensors files onto the device.

`safetensors_reader.py` reads. `base_weights.py` cuts the tensors by `families/weight_rules.py`.
Ranks that have the same weights each read a part, and copy the other parts from one another's GPUs
(`base_memory.py`). If GPUs can't reach one another's memory, each rank reads everything.
"""
