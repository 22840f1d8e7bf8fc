"""A kill soak: real programs on the CPU die and freeze at random moments while their volume and
clocks misbehave.

    python -m bench.soak [--kills 1000] [--seed N]     the soak; `bench.soak.__main__` has the
                                                       options
    python -m bench.soak.check ROOT LEDGER             checks a spool's files again

`stack` starts the programs and finds their processes, `disturb` strikes and damages, `client`
submits jobs and keeps the ledger of what it was promised, `vllm` stands in for vLLM. `check` shares
no code with Tandem.
"""
