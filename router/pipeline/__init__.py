"""The way of a request through the router: validate, tokenize, choose a cell, submit, relay."""
