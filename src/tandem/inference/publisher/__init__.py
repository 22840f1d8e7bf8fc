"""The program that loads checkpoints into vLLM, verifies them and unloads old ones.

`publisher.py` follows runs. `records.py` tells what the only vLLM serves, `replica.py` what one of
several does. `checkpoint_loader.py` loads checkpoints and unloads old ones. `transports.py` has the
ways into vLLM and the local copies of adapters. `verify.py` compares log-probs. `place.py` says
where vLLM is. `shared_gpus.py` puts vLLM to sleep for the trainer and wakes it.

Several inference servers: each vLLM has a publisher of its own, and both have a name,
`TANDEM_REPLICA`. Whoever verifies a step last announces it, and tells the job
(`spool/replicas.py`). vLLM answers requests while its publisher permits it, for 15 s at a time. So
the permission ends before the others take the publisher for dead, which they do after 30 s. Each
process measures that by its own monotonic clock, because hosts' clocks differ and are set. A
replica takes the permission back before it says that it isn't ready. So a replica that answers has
every announced step. Merged weights change in all servers at almost the same time. No answer comes
from weights older than the announced step, and the header `x-tandem-weights` names them. A replica
that can't write to the volume answers 503 after 15 s, because it can't know what the others
announce. The announced steps stay loaded, whatever `TANDEM_KEEP_SERVED` says. No checkpoint is
removed that a living replica serves. With one server there are no such records.
"""
