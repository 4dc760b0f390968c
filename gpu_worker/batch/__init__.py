"""The worker's rows, and the conversion of scheduler steps to model inputs."""
