"""`tandem rl`: a client that rolls out groups with a person's environment and trains them, for a
number of steps."""
