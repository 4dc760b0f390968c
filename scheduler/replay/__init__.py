"""Records a core, replays a recording, and simulates workers in virtual time."""
