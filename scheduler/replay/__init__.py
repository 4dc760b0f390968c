"""Record a core, run a recording again, and simulate workers in virtual time."""
