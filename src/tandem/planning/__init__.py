"""Planning of the trainer's topology, without torch. `checks.py` checks whether the trainer can cut
a model into given sizes of the parallel dimensions. `memory.py` computes a rank's GPU memory.
`plan.py` chooses a topology.
"""
