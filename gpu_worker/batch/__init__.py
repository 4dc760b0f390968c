"""The rows of a worker, and the steps that turn them into the input of the model."""
