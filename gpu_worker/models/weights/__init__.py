"""Read weight files and convert them to the formats that decoders use."""
