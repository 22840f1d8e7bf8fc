"""`tandem up`: runs the programs of a machine or a container under supervisord, and checks their
health.

`supervisord.py` writes supervisord's configuration from one table of programs. `up.py` follows the
programs' logs, and turns the end of the programs into an exit status. `watchdog.py` kills a vLLM
that stalls. `proxy.py` gives several inference servers a common address. `drain.py` removes an
inference server from the common address before the server is stopped. All programs are essential
except the exporter: the other programs continue without the exporter.
"""
