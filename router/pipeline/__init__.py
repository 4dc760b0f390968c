"""The processing of a request in the router: validate, tokenize, choose a cell, submit, relay."""
