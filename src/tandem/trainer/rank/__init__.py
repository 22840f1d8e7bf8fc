"""One rank: a training process, on one GPU or the CPU.

`entry.py` is its program and `train.py` its script: rendezvous, load, train, leave.
`rendezvous.py` has the ranks meet in their parent's store, and they get the job from rank 0.
`session.py` holds a rank's attempt, device and heartbeat: it is no client's session. `state.py`
holds what stays between jobs. `commit.py` makes the job's checkpoint. `checkpoint.py` reads and
writes the adapter and Adam's state, `model_checkpoint.py` all weights and their state.
`model_files.py` writes a Hugging Face model by all ranks at once. `model_loader.py` loads the
model, and can turn it into the reference of its loss. `publication.py` offers whole weights to vLLM
and sends them; `way_to_vllm.py` chooses their network. `full_volume.py` looks for space before a
training.

A rank overlaps the parts of its start:

- CUDA starts in a thread while the ranks connect and Megatron builds the model in host memory that
  is never touched. Then `Policy.place` gives the model its memory on the device. Until CUDA has
  started, a rank has nothing on the device and reports no memory.
- Base weights, the adapter and Adam's moments are one allocation each, because each driver call
  blocks the other threads.
- Base weights are read as soon as their memory is allocated.
- New ranks on a GPU rehearse meanwhile, in a thread: one pass through one layer, with whatever is
  in its memory, loads the kernels.
- The compiled attention is kept in files beside torch's own caches (`model/compiled.py`), so later
  processes load it instead of compiling.
- The mask and RoPE's sines of a row are made once for all layers.
- Tensors in host memory go between ranks through Gloo. So NCCL makes communicators only for the
  groups that the model and its gradients need.

A session's job (`session_loop.py`; `calls.py` applies requests to the model) computes requests as
they come. Ranks load the base model once. Rank 0 looks for the next request each 10 ms and tells
the others. A pass adds its gradients to the gradients of earlier passes since the last optimizer
step. The step sums them over ranks, clips, steps and zeroes, by the code of ordinary jobs. So a
pass and a step equal a job of the same batch, bit for bit. After `TANDEM_SESSION_IDLE_SECONDS`
without a request, the ranks make a checkpoint of what is new, and exit. If another job waits, they
leave after 2 s without a request, and at the latest after that setting's time.
"""
