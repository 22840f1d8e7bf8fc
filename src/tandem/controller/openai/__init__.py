"""OpenAI's fine-tuning API: files, and fine-tuning jobs. Each fine-tuning job is a chain of
Tandem's jobs. `routes_files.py` has the routes of files. `multipart.py` writes an uploaded file to
the volume as it arrives, and `lines.py` checks the file's lines. `routes_tunings.py` has the routes
of fine-tuning jobs. `tuner.py` is the thread that advances the fine-tunings, and `progress.py`
reads their progress. `errors.py` has OpenAI's shape of errors.
"""
