"""The agent of one host: it starts that host's part of an attempt's ranks, watches and ends them,
and measures what they leave (`tandem rank-agent`)."""
