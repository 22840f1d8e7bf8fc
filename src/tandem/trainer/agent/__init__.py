"""The agent of one host (`tandem rank-agent`). The agent starts that host's part of an attempt's
ranks, watches the ranks and ends them. After the ranks have ended, the agent measures the GPU
memory that they left in use. The agent also counts the processes that the ranks left.

`agent.py` serves one host's part of an attempt. `watch.py` reads the volume while the ranks run.
`hosts.py` has the records through which the runner and the hosts' agents communicate. An agent has
a fork server, which starts the host's ranks. The host's number determines the ranks' numbers. The
ranks die when the agent dies. The agent ends the ranks when the attempt has ended, when the runner
no longer renews the job's lease, or when the volume does not answer. No torch.
"""
