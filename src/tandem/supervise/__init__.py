"""`tandem up`: runs the programs of a machine or a container under supervisord, and checks their
health.

`up.py` follows the programs' logs, and turns the end of the programs into an exit status. `up.py`
follows the programs' logs, and turns the end of the stack into an exit status. `watchdog.py` kills
a vLLM that stalls. `proxy.py` gives several inference servers a common address, and `drain.py`
removes one of them from it before it is stopped. All programs are essential except the exporter:
the other programs continue without it.
"""
