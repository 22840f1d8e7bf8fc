"""OpenAI's fine-tuning API: files, and jobs that are chains of Tandem's.

`routes_files.py` takes files: with `multipart.py` a file goes to the volume as it arrives, and
`lines.py` checks it. `routes_tunings.py` takes jobs. `tuner.py` is the thread that carries jobs on,
and `progress.py` reads how far they are. `errors.py` is OpenAI's shape of errors.
"""
