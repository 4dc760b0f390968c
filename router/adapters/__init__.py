"""Front doors for the clients that people already have; each becomes the one native call."""
