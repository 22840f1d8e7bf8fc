"""The program that loads checkpoints into vLLM, verifies them and unloads old ones.

`publisher.py` follows runs. `records.py` records what the only vLLM serves, `replica.py` what one
of several serves. `checkpoint_loader.py` loads checkpoints and unloads old ones. `transports.py`
has the ways by which weights get into vLLM, and the local copies of adapters. `verify.py` compares
log-probs. `place.py` publishes vLLM's address. `shared_gpus.py` puts vLLM to sleep for the trainer
and wakes it.

A step whose tensors or log-probs differ from the checkpoint's is unloaded and recorded as refused,
and the older step stays served (`checkpoint_loader.py`). Requests that run while a step is loaded
keep the adapter that they began with. With merged weights their later tokens come from the new
weights, or the swap waits for them (`TANDEM_SWAP_REQUESTS`).

Several inference servers: each vLLM has a publisher of its own, and both have a name,
`TANDEM_REPLICA`. The publisher that verifies a step last announces it, and tells the job
(`spool/replicas.py`). vLLM answers requests while its publisher permits it, for 15 s at a time. So
the permission ends before the other publishers take this one for dead, after 30 s. Each process
measures this by its own monotonic clock, because the hosts' clocks differ and may be set. A replica
withdraws the permission before it says that it isn't ready. So a replica that answers has every
announced step. Merged weights change in all servers at almost the same time. No answer comes from
weights older than the announced step, and the header `x-tandem-weights` names them. A replica that
can't write to the volume answers 503 after 15 s, because it can't know what the others announce.
The announced steps stay loaded, whatever `TANDEM_KEEP_SERVED` says. No checkpoint is removed that a
living replica serves. With one server these records do not exist.
"""
