"""The program that loads checkpoints into vLLM, verifies the loaded checkpoints, and unloads old
checkpoints.

`publisher.py` follows runs. `records.py` records the served steps if the spool has one vLLM;
`replica.py` records them if the spool has several vLLMs. `checkpoint_loader.py` loads and unloads
single checkpoints. `transports.py` brings weights into vLLM, and manages the local copies of
adapters. `verify.py` compares vLLM's log-probs with the trainer's log-probs. `place.py` publishes
vLLM's address. `shared_gpus.py` puts vLLM to sleep for the trainer and wakes it.

If the tensors or log-probs of a loaded step differ from the checkpoint, the publisher unloads the
step and records the step as refused (`checkpoint_loader.py`). After a refusal, vLLM continues to
serve the older step. A running request keeps the adapter with which it began, even if a new step is
loaded meanwhile. With merged weights, running requests either continue on the new weights or delay
the swap until they have ended (`TANDEM_SWAP_REQUESTS`).

If there are several inference servers, each vLLM has its own publisher. A vLLM and its publisher
have the same name, `TANDEM_REPLICA`. The last publisher to verify a step announces the step, and
writes the event `served` to the step's job (`spool/replicas.py`). Each vLLM answers requests only
with permission from its publisher. The permission is valid for 15 s, and the publisher renews it.
The other publishers consider a publisher dead if its record has not changed for 30 s. If a
publisher dies, its vLLM loses the permission before the other publishers consider this publisher
dead. Each process measures the age of permissions and records with its own monotonic clock, because
the hosts' clocks differ and may be changed. To take its replica out of service, a publisher first
withdraws vLLM's permission, and then records that the replica isn't ready. A replica that answers
requests therefore has every announced step. Merged weights change in all servers at almost the same
time. No answer comes from weights older than the announced step. The header `x-tandem-weights` of
an answer names the weights that sampled the answer. A replica that can't write to the volume
answers with status 503 after 15 s. Without the volume, a replica can't know which steps the other
replicas announce. The announced steps stay loaded, even if they are not among the newest
`TANDEM_KEEP_SERVED` steps. A checkpoint that a living replica serves is not removed. A deployment
with only one inference server has no records of replicas.
"""
