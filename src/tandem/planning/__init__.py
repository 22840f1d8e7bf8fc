"""Plans, without torch.

`checks.py` says whether the trainer can cut a model so, `memory.py` what a rank needs of its GPU,
and `plan.py` which topology to take.
"""
