"""vLLM's command line, and the code that runs inside vLLM's server.

`command.py` makes the command line, with the arguments that a family of models needs
(`family_arguments.py`). `serve.py` starts vLLM when its GPUs are free. `plugin.py` runs in each of
vLLM's processes. `patches.py` has every replacement of a function of vLLM.

`middleware/` runs in vLLM's API server and answers HTTP requests. `worker/` runs in vLLM's engine
and workers. The code of `middleware/` and the code of `worker/` run in different processes, so
neither imports the other. An order for a worker goes through vLLM's engine. The modules of this
directory name the middlewares only as strings on vLLM's command line. The publisher and the command
line, which read `command.py`, therefore load no middleware.
"""
