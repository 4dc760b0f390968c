"""`midstream top`: what a running service does, live, on a terminal."""
