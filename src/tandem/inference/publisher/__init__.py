"""The program that loads checkpoints into vLLM, verifies them and unloads old ones.

`publisher.py` follows runs. `records.py` records what vLLM serves if the spool has one vLLM;
`replica.py` does if there are several. `checkpoint_loader.py` loads checkpoints and unloads old
ones. `transports.py` has the ways to bring weights into vLLM, and the local copies of adapters.
`verify.py` compares log-probs. `place.py` publishes vLLM's address. `shared_gpus.py` puts vLLM to
sleep for the trainer and wakes it.

A step whose tensors or log-probs differ from the checkpoint's is unloaded and recorded as refused,
and the older step stays served (`checkpoint_loader.py`). Requests that run while a step is loaded
keep the adapter that they began with. With merged weights, either their later tokens come from the
new weights, or the swap waits for the requests (`TANDEM_SWAP_REQUESTS`).

Several inference servers: each vLLM has a publisher of its own. vLLM and publisher have the same
name, `TANDEM_REPLICA`. The last publisher to verify a step announces the step and informs the job
(`spool/replicas.py`). vLLM answers requests only with permission from its publisher, which is valid
for 15 s and is renewed. So the permission ends before the other publishers consider this one dead,
after 30 s. Each process measures these times with its own monotonic clock, because the hosts'
clocks differ and may be changed. A replica first withdraws the permission, and then records that it
isn't ready. So a replica that answers has every announced step. Merged weights change in all
servers at almost the same time. No answer comes from weights older than the announced step, and the
header `x-tandem-weights` names the weights. A replica that can't write to the volume answers 503
after 15 s, because it can't know which steps the others announce. The announced steps stay loaded,
even beyond `TANDEM_KEEP_SERVED`. A checkpoint that a living replica serves is not removed. With one
server these records do not exist.
"""
