"""The program that loads checkpoints into vLLM, verifies the loaded checkpoints, and unloads old
checkpoints.

`publisher.py` follows runs. `records.py` records the steps that vLLM serves if the spool has one
vLLM; `replica.py` records these steps if the spool has several vLLMs. `checkpoint_loader.py` loads
and unloads single checkpoints. `transports.py` brings weights into vLLM, and manages the local
copies of adapters. `verify.py` compares vLLM's log-probs with the trainer's. `place.py` publishes
vLLM's address. `shared_gpus.py` puts vLLM to sleep for the trainer and wakes it.

If the tensors or log-probs of a loaded step differ from those of its checkpoint, the step is
unloaded and recorded as refused, and vLLM continues to serve the older step
(`checkpoint_loader.py`). Requests that run while a new step is loaded continue with the adapter
that they began with. With merged weights, either the later tokens of running requests come from the
new weights, or the swap waits until the requests have ended (`TANDEM_SWAP_REQUESTS`).

Several inference servers: each vLLM has a publisher of its own. vLLM and publisher have the same
name, `TANDEM_REPLICA`. The last publisher to verify a step announces the step and informs the job
(`spool/replicas.py`). vLLM answers requests only with permission from its publisher. A permission
is valid for 15 s, and the publisher renews it. The other publishers consider a publisher dead after
30 s of silence. By then, the permission of the dead publisher's vLLM has ended. Each process
measures the 15 s and the 30 s with its own monotonic clock, because the hosts' clocks differ and
may be changed. A publisher first withdraws the permission, and then records that its replica isn't
ready. So a replica that answers requests has every announced step. Merged weights change in all
servers at almost the same time. No answer comes from weights older than the announced step, and the
header `x-tandem-weights` names the weights. A replica that can't write to the volume answers with
status 503 after 15 s, because it can't know which steps the other replicas announce. The announced
steps stay loaded, even beyond `TANDEM_KEEP_SERVED`. A checkpoint that a living replica serves is
not removed. With only one server, the records of replicas do not exist.
"""
