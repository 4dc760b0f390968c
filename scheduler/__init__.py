"""The scheduler: owns every request and every KV block, and plans the workers' steps."""
