"""Inside vLLM's workers: `weight_layout.py` says where each weight lies, and `model_weights.py`
merges adapters into the weights. `landing.py` gets whole weights, from the trainer's ranks or from
files, and exchanges them.
"""
