"""Code inside vLLM's engine and workers. `extension.py` adds the orders for merged weights to
vLLM's workers, and the swap to its engine. `weight_layout.py` finds the place of each weight, and
`model_weights.py` merges adapters into the weights. `landing.py` receives whole weights, from the
trainer's ranks or from files, and swaps them with the live weights. `held_adapter.py` compares a
loaded adapter with its file. `gathered_outputs.py` makes the engine send the tokens of several
steps at once.
"""
