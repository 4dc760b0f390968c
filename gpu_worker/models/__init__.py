"""Models that run natively."""
