"""`tandem rl`: a client that rolls out groups with the user's environment and trains on them, for a
number of steps.

`loop.py` rolls out, submits and follows. The user's environment runs in this process: `rollout.py`
runs one rollout, `groups.py` a group of them, and `watch.py` names code that blocks the event loop.
`evaluation.py` evaluates, and `distill.py` asks a teacher. `limits.py` ends a run that leads
nowhere. `record.py` writes the state with which the same command resumes, `samples.py` the sampled
texts, for people.
"""
