"""Tandem in other people's loops: ART (`art`), verifiers (`verifiers`). Each imports its package when it is used."""
