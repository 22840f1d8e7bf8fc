"""One rank: a training process, on one GPU or the CPU.

`entry.py` is the rank's program. `train.py` runs the steps of a job: rendezvous, load, train,
leave. `rendezvous.py` connects the ranks through their parent's store, and rank 0 sends them the
job. `session.py` has a rank's attempt, device and heartbeat; it has nothing to do with a client's
session. `state.py` has the state that a resident rank keeps between jobs. `commit.py` makes the
job's checkpoint. `checkpoint.py` reads and writes the adapter and Adam's state;
`model_checkpoint.py` reads and writes all weights and their optimizer state, if the run trains all
weights. `model_files.py` writes a Hugging Face model from all ranks at the same time.
`model_loader.py` loads the model, and can turn it into the reference policy of the loss.
`publication.py` offers whole weights to vLLM and sends them; `way_to_vllm.py` chooses the network
between ranks and vLLM. `full_volume.py` waits for space before a training.

A rank overlaps the parts of its start:

- CUDA starts in a thread while the ranks connect and Megatron builds the model in untouched host
  memory. Then `Policy.place` allocates the model's memory on the device. Until CUDA has started, a
  rank uses no device memory and reports none.

- Base weights, the adapter and Adam's moments are one allocation each, because each call of the
  driver blocks the other threads.

- Base weights are read as soon as their memory is allocated.

- While the weights are read, a new rank on a GPU rehearses in a thread: one pass through one layer,
  with arbitrary weights, loads the kernels.

- The compiled attention is stored in files beside torch's own caches (`model/compiled.py`), so
  later processes load it instead of compiling it.

- A row's mask and RoPE's sines are computed once for all layers.

- Ranks exchange tensors in host memory through Gloo. So NCCL creates communicators only for the
  groups that the model and its gradients need.

A session's job (`session_loop.py`; `calls.py` applies requests to the model) computes requests as
they arrive. Ranks load the base model once per job. Rank 0 looks for the next request every 10 ms
and sends it to the other ranks. A pass adds its gradients to the gradients of earlier passes since
the last optimizer step. The optimizer step sums the gradients over ranks, clips them, updates the
weights and zeroes the gradients, with the code of ordinary jobs. So a pass and a step give the same
bits as a job with the same batch. After `TANDEM_SESSION_IDLE_SECONDS` without a request, the ranks
make a checkpoint of all changes, and exit. If another job waits, the ranks leave after 2 s without
a request, and at the latest after `TANDEM_SESSION_IDLE_SECONDS`.
"""
