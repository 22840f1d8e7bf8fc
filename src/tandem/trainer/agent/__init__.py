"""The agent of one host: it starts that host's part of an attempt's ranks, watches and ends them,
and measures what they leave (`tandem rank-agent`).

`agent.py` serves one host's part of an attempt. `watch.py` reads the volume while the ranks run.
`hosts.py` has the records by which runner and hosts meet. An agent has a fork server and starts its
host's ranks with numbers that the host's number fixes. The ranks die with the agent. The agent ends
them when the attempt was ended, or when runner or volume are gone. No torch.
"""
