"""The scheduler: owns every request and every KV block, and tells workers what to run."""
