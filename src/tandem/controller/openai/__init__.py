"""OpenAI's fine-tuning API: files, and jobs that are chains of Tandem's."""
