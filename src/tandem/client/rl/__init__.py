"""`tandem rl`: a client that rolls out groups with a person's environment and trains them, for a
number of steps.

`loop.py` rolls out, submits and follows. A person's environment runs in its process: `rollout.py`
plays it, `groups.py` plays it several times, and `watch.py` names what blocks. `evaluation.py`
evaluates, and `distill.py` asks a teacher. `limits.py` says when nothing comes of a run.
`record.py` keeps what the same command needs to go on, `samples.py` what was sampled, for people.
"""
