"""`midstream top`: a live view of a running service on a terminal."""
