"""The worker: executes the scheduler's steps on a model."""
