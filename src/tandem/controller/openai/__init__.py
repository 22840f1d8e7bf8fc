"""OpenAI's fine-tuning API: files, and fine-tuning jobs, each a chain of Tandem's jobs.

`routes_files.py` takes files: with `multipart.py` a file goes to the volume as it arrives, and
`lines.py` checks it. `routes_tunings.py` takes jobs. `tuner.py` is the thread that advances the
fine-tunings, and `progress.py` reads their progress. `errors.py` has OpenAI's shape of errors.
"""
