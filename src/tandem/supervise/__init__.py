"""`tandem up`: runs the programs of a machine or a container under supervisord, and checks their
health.

`supervisord.py` writes supervisord's configuration from one table of programs. `up.py` follows the
programs' logs, and turns the end of the stack into an exit status. `watchdog.py` kills a vLLM that
stalls. `proxy.py` gives several inference servers one address, and `drain.py` takes one of them out
before it is stopped. All programs are essential except the exporter: the stack goes on without it.
"""
