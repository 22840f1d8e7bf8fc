"""Code inside vLLM's workers. `weight_layout.py` finds the place of each weight, and
`model_weights.py` merges adapters into the weights. `landing.py` receives whole weights, from the
trainer's ranks or from files, and swaps them with the live weights.
"""
