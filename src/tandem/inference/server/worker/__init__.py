"""Code inside vLLM's workers: `weight_layout.py` finds each weight's place, and `model_weights.py`
merges adapters into the weights. `landing.py` receives whole weights, from the trainer's ranks or
from files, and exchanges them.
"""
