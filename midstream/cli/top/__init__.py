"""`midstream top`: live view of a running service on a terminal."""
