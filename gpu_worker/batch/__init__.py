"""The worker's rows, and the conversion of the scheduler's steps to model inputs."""
