"""`tandem rl`: a client that rolls out groups with the user's environment and trains on them, for a
number of steps.

`loop.py` rolls groups out, submits jobs and follows the jobs. The user's environment runs in this
process: `rollout.py` runs one rollout, `groups.py` a group of rollouts, and `watch.py` names code
that blocks the event loop. `evaluation.py` evaluates steps, and `distill.py` gets a teacher's
log-probs. `limits.py` ends a loop in which nothing is learnt. `record.py` writes the state from
which the same command resumes. `samples.py` writes the sampled texts, for people.
"""
